// The sampling settings: what is in the form goes into the request, and an empty field does not.

import { byId } from "./elements.js";

const TEMPERATURE = 0.7; // proposed for a model that names none: at OpenAI's default, 1, small models ramble

const fields = () => byId("settings").querySelectorAll("[name]");

/** Shows the model's own values in the empty fields. */
export function offerSettings(defaults) {
  for (const field of fields()) {
    if (field.name in defaults) field.placeholder = `${defaults[field.name]}, the model's`;
  }
  if (!("temperature" in defaults)) byId("temperature").value = TEMPERATURE;
  byId("reset").addEventListener("click", () => fields().forEach((field) => (field.value = "")));
}

/** The fields of a request by name; `system` is a text, the others are numbers. */
export function readSettings() {
  const settings = {};
  for (const field of fields()) {
    if (field.value !== "") settings[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return settings;
}
