/** The dialog that asks for an API key. */

import { byId } from "./elements.js";
import { hasKey, useKey, whenKeyIsWanted } from "./requests.js";

/** The answer that is awaited. @type {Promise<string> | null} */
let asking = null;

/** Ask for a key whenever the service wants one; the button forgets it. @param {HTMLElement} button */
export function startKeyDialog(button) {
  whenKeyIsWanted((refused) => {
    asking ??= askForKey(refused).finally(() => (asking = null));
    return asking;
  });
  button.addEventListener("click", () => {
    useKey("");
    location.reload();
  });
}

/** @param {HTMLElement} button is shown once there is a key */
export function showKeyButton(button) {
  button.hidden = !hasKey();
}

/** @param {boolean} refused whether the service does not know the key that was sent @returns {Promise<string>} */
function askForKey(refused) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("ask-key"));
  const input = /** @type {HTMLInputElement} */ (byId("key-field"));
  byId("key-problem").textContent = refused ? "The service does not know that key." : "";
  input.value = "";
  dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(input.value.trim()), { once: true });
  });
}
