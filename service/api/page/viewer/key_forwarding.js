/** Forwarding of keys to the view that was used last, so that its shortcuts work wherever the focus is, unless the user is typing. */

/** Keys that move the focus, scroll, or press the focused control. They are forwarded only if no control has the focus. */
const CONTROL_KEYS = [
  "ArrowUp",
  "ArrowDown",
  "ArrowLeft",
  "ArrowRight",
  "PageUp",
  "PageDown",
  "Home",
  "End",
  "Enter",
  "Backspace",
  "Delete",
  " ",
];
const CONTROL_SELECTOR = 'button, a, summary, input, [tabindex="0"]';
/** Controls for which letters and digits are input. */
const TYPING_SELECTOR = "textarea, select, input:not([type=range], [type=checkbox], [type=radio], [type=file])";

/** The view that was used last. @type {HTMLElement | null} */
let activeStage = null;
let isForwarding = false;

/** Forward keys to this view until another view is used. @param {HTMLElement} stage */
export function activateStage(stage) {
  activeStage = stage;
}

/** Forward keys to a view as soon as the pointer or the focus is in the view. @param {HTMLElement} stage */
export function listenForUse(stage) {
  for (const name of ["pointerenter", "pointerdown", "focus"]) stage.addEventListener(name, () => activateStage(stage));
}

/** @param {KeyboardEvent} event @returns {boolean} whether the key is meant for the views although another element has the focus */
function isForViews({ key, target, defaultPrevented }) {
  if (defaultPrevented || isForwarding || key === "Tab" || !(target instanceof Element)) return false;
  if (target.closest(`.view[data-axis] .stage, ${TYPING_SELECTOR}`) || document.querySelector("dialog[open]"))
    return false;
  return !(CONTROL_KEYS.includes(key) && target.closest(CONTROL_SELECTOR));
}

document.addEventListener("keydown", (event) => {
  if (!isForViews(event) || !activeStage?.checkVisibility()) return;
  const { key, code, ctrlKey, shiftKey, altKey, metaKey, repeat } = event;
  const modifiers = { ctrlKey, shiftKey, altKey, metaKey };
  isForwarding = true;
  const forwardedEvent = new KeyboardEvent("keydown", {
    key,
    code,
    repeat,
    ...modifiers,
    bubbles: true,
    cancelable: true,
  });
  const isHandled = !activeStage.dispatchEvent(forwardedEvent);
  isForwarding = false;
  if (isHandled) event.preventDefault();
});
