/** Dialog that prompts for an API key. */

import { byId } from "./elements.js";
import { hasKey, setKeyPrompt, storeKey } from "./requests.js";

/** The open prompt, shared by all requests that wait for a key. @type {Promise<string> | null} */
let openPrompt = null;

/** Open a dialog whenever a request needs a key, and connect the button that deletes the key. @param {HTMLElement} button */
export function setUpKeyDialog(button) {
  setKeyPrompt((isRejected) => {
    openPrompt ??= promptForKey(isRejected).finally(() => (openPrompt = null));
    return openPrompt;
  });
  button.addEventListener("click", () => {
    storeKey("");
    location.reload();
  });
}

/** Show the button that deletes the stored key, or hide it if no key is stored. @param {HTMLElement} button */
export function updateKeyButton(button) {
  button.hidden = !hasKey();
}

/** Show the dialog, and wait for the user to enter a key. @param {boolean} isRejected whether the service rejected the stored key @returns {Promise<string>} */
function promptForKey(isRejected) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("ask-key"));
  const input = /** @type {HTMLInputElement} */ (byId("key-field"));
  byId("key-problem").textContent = isRejected ? "The service rejected this key. Check it and try again." : "";
  input.value = "";
  dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(input.value.trim()), { once: true });
  });
}
