// Starts the page: the key if there is one, the model, then chat, live numbers and ranks.

import { getJSON, whenKeyIsMissing } from "./api.js";
import { startChat } from "./chat.js";
import { byId, html } from "./elements.js";
import { startLive } from "./live.js";
import { showRanks } from "./ranks.js";

whenKeyIsMissing(
  (wasWrong) =>
    new Promise((resolve) => {
      const dialog = byId("key-dialog");
      byId("key-error").textContent = wasWrong ? "The server does not know this key." : "";
      dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to see without
      byId("key-form").addEventListener(
        "submit",
        (event) => {
          event.preventDefault();
          dialog.close();
          resolve(byId("key").value.trim());
          byId("key").value = "";
        },
        { once: true },
      );
      dialog.showModal();
    }),
);

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of document.querySelectorAll(".views button")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
  });
}

try {
  const model = await getJSON("page/model");
  byId("model-name").textContent = model.name;
  byId("model-name").title = model.name;
  document.title = `${model.name} · thinrank`;
  startChat(model);
  startLive();
  showRanks(await getJSON("ranks"));
} catch (error) {
  byId("state").dataset.state = "failed";
  byId("state").textContent = "failed";
  document.querySelector("header").after(html("p", { class: "notice", role: "alert" }, `Cannot start: ${error.message}. Reload to try again.`));
}
