// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(value);

/** Three significant digits: 2.43, 18.7, 431; and 0. */
export function short(value) {
  if (value === 0) return "0";
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

/** 0 %, 0.8 %, 40 %, 99.6 %, 100 % */
export function percent(share) {
  const coarse = share === 0 || share === 1 || (share >= 0.0995 && share < 0.995);
  return `${(100 * share).toFixed(coarse ? 0 : 1)} %`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? short(value) : value} ${units[unit]}`;
}

/** 134.5 M */
export function millions(value) {
  return value >= 1e9 ? `${(value / 1e9).toFixed(2)} B` : `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} M`;
}
