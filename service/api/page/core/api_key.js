/** The dialog that asks for an API key. */

import { byId } from "./elements.js";
import { hasKey, setKeyPrompt, storeKey } from "./requests.js";

/** The open prompt, shared by all requests that wait for a key. @type {Promise<string> | null} */
let openPrompt = null;

/** Prompt for a key when the service requires one. @param {HTMLElement} button discards the stored key */
export function startKeyDialog(button) {
  setKeyPrompt((rejected) => {
    openPrompt ??= promptForKey(rejected).finally(() => (openPrompt = null));
    return openPrompt;
  });
  button.addEventListener("click", () => {
    storeKey("");
    location.reload();
  });
}

/** @param {HTMLElement} button visible if a key is stored */
export function showKeyButton(button) {
  button.hidden = !hasKey();
}

/** @param {boolean} rejected whether the service rejected the stored key @returns {Promise<string>} */
function promptForKey(rejected) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("ask-key"));
  const input = /** @type {HTMLInputElement} */ (byId("key-field"));
  byId("key-problem").textContent = rejected ? "The service rejected this key. Check it and try again." : "";
  input.value = "";
  dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(input.value.trim()), { once: true });
  });
}
