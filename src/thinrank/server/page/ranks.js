// The model's ranks as a picture: a row a layer, a column a module, and the same numbers as a table.

import { byId, html, svg } from "./elements.js";
import { count, millions, percent } from "./numbers.js";

const WIDTH = 360;
const LEFT = 24; // room for the numbers of layers
const TOP = 34; // and for the names of modules
const GAP = 2;
const GROUP_GAP = 8; // between attention and MLP

const map = byId("map");
let modules = [];
let cells = []; // elements, in the order of `modules`
let current = 0; // the one that the keyboard is at

const tooltip = html("div", { class: "tooltip", hidden: "", "aria-live": "polite" });

export function showRanks(ranks) {
  modules = ranks.modules;
  summarise(ranks);
  draw(ranks.num_layers);
  explain();
  tabulate();
  for (const input of byId("measure").querySelectorAll("input")) input.addEventListener("change", colour);
  colour();
  map.append(tooltip);
  map.addEventListener("pointerover", (event) => {
    const index = cells.indexOf(event.target.closest(".cell"));
    if (index >= 0) point(index);
  });
  map.addEventListener("pointerleave", hide);
  map.addEventListener("blur", hide);
  map.addEventListener("focus", () => map.matches(":focus-visible") && point(current));
  map.addEventListener("keydown", move);
}

const shares = {
  rank: (module) => (module.rank === null ? 1 : module.rank / module.full_rank),
  parameters: (module) => module.parameters / module.dense_parameters,
};

function summarise(ranks) {
  const factored = modules.filter((module) => module.rank !== null).length;
  const kept = percent(ranks.linear_parameters / ranks.dense_linear_parameters);
  const whole = `${millions(ranks.parameters)} of ${millions(ranks.dense_parameters)} parameters, embedding included`;
  byId("ranks-summary").textContent = factored
    ? `${count(factored)} of ${count(modules.length)} projections are low-rank; together they keep ${kept} of their ` +
      `parameters. The model has ${whole}.`
    : `All ${count(modules.length)} projections are dense: this model is not compressed.`;
}

function draw(numLayers) {
  const names = [...new Set(modules.filter((module) => module.layer !== null).map((module) => module.name))];
  const groups = names.map((name) => name.split(".")[0]);
  const groupOf = (column) => new Set(groups.slice(0, column + 1)).size - 1;
  const width = (WIDTH - LEFT - GROUP_GAP * groupOf(names.length - 1)) / names.length;
  const height = Math.min(20, Math.max(7, 400 / numLayers));
  const x = (column) => LEFT + column * width + GROUP_GAP * groupOf(column);
  const y = (layer) => TOP + layer * height;
  const outside = modules.filter((module) => module.layer === null);
  const bottom = y(numLayers) + (outside.length ? 10 + 20 * outside.length : 0);

  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${bottom}`, role: "img", "aria-label": byId("ranks-summary").textContent },
    svg(
      "defs",
      {},
      svg(
        "pattern",
        { id: "dense", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("rect", { width: 5, height: 5, class: "hatch-ground" }),
        svg("rect", { width: 1.6, height: 5, class: "hatch-line" }),
      ),
    ),
  );
  names.forEach((name, column) => {
    const label = name.split(".").at(-1).replace("_proj", "");
    picture.append(svg("text", { x: x(column) + width / 2, y: TOP - 7, class: "label" }, label));
  });
  for (const group of new Set(groups)) {
    const columns = groups.flatMap((each, column) => (each === group ? [column] : []));
    const middle = (x(columns[0]) + x(columns.at(-1)) + width) / 2;
    const title = { self_attn: "attention", mlp: "MLP" }[group] ?? group;
    picture.append(svg("text", { x: middle, y: 12, class: "label group" }, title));
  }
  const every = numLayers > 16 ? 5 : 1;
  for (let layer = 0; layer < numLayers; layer += every) {
    picture.append(svg("text", { x: LEFT - 6, y: y(layer) + height / 2, class: "label layer" }, String(layer)));
  }
  cells = modules.map((module) => {
    const row = outside.indexOf(module);
    const place =
      row < 0
        ? { x: x(names.indexOf(module.name)), y: y(module.layer), width: width - GAP, height: height - GAP }
        : { x: LEFT + 60, y: y(numLayers) + 10 + 20 * row, width: WIDTH - LEFT - 60 - GAP, height: 16 };
    if (row >= 0) {
      picture.append(svg("text", { x: LEFT, y: place.y + 8, class: "label outside" }, module.name));
    }
    return cell(module, place);
  });
  picture.append(...cells);
  map.replaceChildren(picture);
}

function cell(module, place) {
  const element = svg("g", { class: "cell" }, svg("rect", { ...place, rx: 2 }));
  if (module.rank === null) element.classList.add("dense");
  if (module.shared_with.length) {
    const radius = Math.min(3, place.height / 3);
    element.append(svg("circle", { cx: place.x + place.width / 2, cy: place.y + place.height / 2, r: radius }));
  }
  return element;
}

function colour() {
  const measure = byId("measure").querySelector("input:checked").value;
  modules.forEach((module, index) => {
    cells[index].style.setProperty("--share", Math.min(1, shares[measure](module)).toFixed(4));
  });
}

function explain() {
  const entries = [html("span", { class: "scale" }, html("span", {}, "0 %"), html("i"), html("span", {}, "100 %"))];
  if (modules.some((module) => module.rank === null)) {
    const swatch = svg("svg", { width: 14, height: 14, "aria-hidden": "true" });
    swatch.append(svg("g", { class: "cell dense" }, svg("rect", { width: 14, height: 14, rx: 2 })));
    entries.push(html("span", { class: "key" }, swatch, "dense"));
  }
  if (modules.some((module) => module.shared_with.length)) {
    const swatch = svg("svg", { width: 14, height: 14, "aria-hidden": "true" });
    swatch.append(svg("g", { class: "cell" }, svg("rect", { width: 14, height: 14, rx: 2 }), svg("circle", { cx: 7, cy: 7, r: 3 })));
    entries.push(html("span", { class: "key" }, swatch, "shares its factor_in"));
  }
  byId("legend").replaceChildren(...entries);
}

function tabulate() {
  const head = ["Module", "Shape", "Rank", "of full", "Parameters", "of dense", "Factor_in shared with"];
  const rows = modules.map((module) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, module.module.replace("model.layers.", "")),
      ...[
        `${module.out_features} × ${module.in_features}`,
        module.rank === null ? "dense" : count(module.rank),
        module.rank === null ? "" : percent(shares.rank(module)),
        count(module.parameters),
        percent(shares.parameters(module)),
        module.shared_with.map((name) => name.replace("model.layers.", "")).join(", "),
      ].map((text) => html("td", {}, text)),
    ),
  );
  byId("table").replaceChildren(
    html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, ...rows),
  );
}

function move(event) {
  const module = modules[current];
  const step = {
    ArrowLeft: () => current - 1,
    ArrowRight: () => current + 1,
    ArrowUp: () => modules.findIndex((each) => each.name === module.name && each.layer === module.layer - 1),
    ArrowDown: () => modules.findIndex((each) => each.name === module.name && each.layer === module.layer + 1),
    Home: () => 0,
    End: () => modules.length - 1,
  }[event.key];
  if (event.key === "Escape") hide();
  if (!step) return;
  event.preventDefault();
  const next = step();
  if (next >= 0 && next < modules.length) point(next);
}

function point(index) {
  cells[current].classList.remove("current");
  current = index;
  const [module, element] = [modules[index], cells[index]];
  element.classList.add("current");
  element.parentNode.append(element); // last, so that its outline lies above its neighbours
  tooltip.replaceChildren(html("strong", {}, module.module), ...describe(module).map((line) => html("span", {}, line)));
  tooltip.hidden = false;
  const [frame, box] = [map.getBoundingClientRect(), element.getBoundingClientRect()];
  const left = box.left - frame.left + box.width / 2 - tooltip.offsetWidth / 2;
  tooltip.style.left = `${Math.max(0, Math.min(left, frame.width - tooltip.offsetWidth))}px`;
  const above = box.top - frame.top - tooltip.offsetHeight - 6;
  tooltip.style.top = `${above < 0 ? box.bottom - frame.top + 6 : above}px`;
}

function describe(module) {
  const kept = `${count(module.parameters)} of ${count(module.dense_parameters)} parameters, ${percent(shares.parameters(module))}`;
  const lines = [
    module.rank === null
      ? `dense, ${module.out_features} × ${module.in_features}`
      : `rank ${count(module.rank)} of ${count(module.full_rank)}, ${percent(shares.rank(module))}`,
    kept,
  ];
  if (module.shared_with.length) {
    const names = module.shared_with.map((name) => name.replace("model.layers.", ""));
    lines.push(`shares its factor_in with ${names.join(", ")}`);
  }
  return lines;
}

function hide() {
  tooltip.hidden = true;
  cells[current].classList.remove("current");
}
