/** Helpers that create and update elements. Strings are inserted as text nodes and never parsed as markup. */

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * Create an element.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [properties] `on...` functions become event listeners; names that are not DOM properties become attributes
 * @param {Child[]} children empty children (null, undefined, false) are skipped
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") {
      node.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name in node && name !== "list") {
      Reflect.set(node, name, value);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter(isPresent).map(toNode));
  return node;
}

/** @param {Child} child */
function isPresent(child) {
  return child !== null && child !== undefined && child !== false;
}

/** @param {Child} child @returns {Node} */
function toNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** A quotation of code in a message of the service, such as `access.hosts`. */
const CODE_PATTERN = /`([^`\n]+)`/;

/** Format a message of the service, or an error with such a message. Text in backticks becomes code. @param {unknown} message @returns {DocumentFragment} */
export function formatMessage(message) {
  const text = message instanceof Error ? message.message : String(message);
  const fragment = document.createDocumentFragment();
  // The pattern captures the code, so every second part is code.
  fragment.append(...text.split(CODE_PATTERN).map((part, index) => (index % 2 ? element("code", {}, part) : part)));
  return fragment;
}

/**
 * Return the element with the given id. Throws an Error if the document has no such element.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const match = document.getElementById(id);
  if (match === null) throw new Error(`The document has no element with the id "${id}".`);
  return match;
}

/** Show the title of a view in the header, and in the tab and the history of the browser. @param {string} title */
export function setTitle(title) {
  byId("title").textContent = title;
  document.title = `${title} – StackSeg`;
}

/**
 * Create a button. While its action is running, the button is marked as busy and ignores clicks.
 * @param {string} text @param {() => unknown} action @param {string} [classNames]
 */
export function button(text, action, classNames = "") {
  const onclick = async () => {
    if (node.ariaBusy === "true") return;
    node.ariaBusy = "true";
    try {
      await action();
    } finally {
      node.ariaBusy = null;
    }
  };
  const node = element("button", { type: "button", class: classNames, onclick }, text);
  return node;
}

/**
 * Wrap a control in a label, with an optional hint below the control.
 * @param {string} text
 * @param {HTMLElement} control
 * @param {Child} [hint]
 */
export function field(text, control, hint) {
  return element("label", { class: "field" }, element("span", { class: "field-name" }, text), control, hint);
}

/**
 * Open a modal dialog that is removed from the document when it closes. It closes when another view opens.
 * @param {string} title @param {(Node | false)[]} content
 * @returns {HTMLDialogElement}
 */
export function openDialog(title, ...content) {
  const heading = element("h2", { id: "dialog-title" }, title);
  const dialog = element("dialog", { class: "wide-dialog", "aria-labelledby": heading.id }, heading, ...content);
  const close = () => dialog.close();
  window.addEventListener("hashchange", close);
  dialog.addEventListener("close", () => {
    window.removeEventListener("hashchange", close);
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Create a list of keyboard and mouse shortcuts. @param {string[][]} shortcuts pairs of a key or gesture and its action */
export function createShortcutList(shortcuts) {
  const terms = shortcuts.flatMap(([key, action]) => [element("dt", {}, key), element("dd", {}, action)]);
  return element("dl", { class: "shortcut-list" }, ...terms);
}

/** Save a blob as a file in the browser's download folder. @param {Blob} blob @param {string} name */
export function downloadBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** The control with uncommitted input, and the element on which a pointer is pressed. `redraw` does not replace either. */
const busyElements = {
  editedControl: /** @type {EventTarget | null} */ (null),
  pressedElement: /** @type {EventTarget | null} */ (null),
};
/** Functions that create the new children of elements whose redraw is postponed until the user has committed the input or released the pointer. @type {Map<HTMLElement, () => Child[]>} */
const pendingRedraws = new Map();
const FOCUSABLE_SELECTOR = "input, select, textarea, button, summary, a[href], [tabindex]";

/** @param {keyof typeof busyElements} reason @param {EventTarget | null} target null once the user has committed the input or released the pointer */
function setBusy(reason, target) {
  busyElements[reason] = target;
  // The handlers of the click and of the focus change have to run first.
  if (target === null && pendingRedraws.size > 0) setTimeout(runPendingRedraws);
}

function runPendingRedraws() {
  for (const [root, createChildren] of [...pendingRedraws]) redraw(root, createChildren);
}

document.addEventListener("input", ({ target }) => setBusy("editedControl", target));
document.addEventListener("pointerdown", ({ target }) => setBusy("pressedElement", target), true);
for (const name of ["change", "focusout"]) document.addEventListener(name, () => setBusy("editedControl", null));
for (const name of ["pointerup", "pointercancel"])
  document.addEventListener(name, () => setBusy("pressedElement", null), true);

/** Values of controls when they were created. A control with another value contains input that was not committed, such as one of three lengths. @type {WeakMap<Element, string>} */
const createdValues = new WeakMap();

/**
 * Replace the children of an element. The redraw is postponed while the user is typing in a child or pressing a child. Input
 * that was not committed is kept. If a child has the focus, the new control with the same id, label or text receives the
 * focus.
 * @param {HTMLElement} root @param {() => Child[]} createChildren
 */
export function redraw(root, createChildren) {
  pendingRedraws.delete(root);
  const { editedControl, pressedElement } = busyElements;
  if (
    [editedControl, pressedElement].some((target) => target instanceof Node && target !== root && root.contains(target))
  ) {
    pendingRedraws.set(root, createChildren);
    return;
  }
  const focusedElement = document.activeElement;
  const earlierControls = [...root.querySelectorAll(FOCUSABLE_SELECTOR)];
  const children = createChildren().filter(isPresent).map(toNode);
  const replacement = element("div", {}, ...children);
  const controls = [...replacement.querySelectorAll(FOCUSABLE_SELECTOR)];
  for (const control of controls) if (isTextField(control)) createdValues.set(control, control.value);
  const findCounterpart = createCounterpartFinder(earlierControls, controls);
  for (const control of earlierControls.filter(isTextField)) keepUncommittedInput(control, findCounterpart(control));
  const focusedField = isTextField(focusedElement) ? focusedElement : null;
  const selection = focusedField && [focusedField.selectionStart, focusedField.selectionEnd];
  const focusTarget = focusedElement && findCounterpart(focusedElement);
  root.replaceChildren(...children);
  if (!(focusTarget instanceof HTMLElement)) return;
  focusTarget.focus({ preventScroll: true });
  if (isTextField(focusTarget) && selection) restoreSelection(focusTarget, selection);
}

/** @param {Element | null | undefined} node @returns {node is HTMLInputElement} whether the user types in the control */
function isTextField(node) {
  return node instanceof HTMLInputElement && ["text", "number", "search"].includes(node.type);
}

/** Copy input that was not committed to the control that replaces its control, unless the value to show has changed. @param {Element} control @param {Element | undefined} counterpart */
function keepUncommittedInput(control, counterpart) {
  if (!isTextField(control) || !isTextField(counterpart)) return;
  const createdValue = createdValues.get(control);
  if (control !== counterpart && control.value !== createdValue && counterpart.value === createdValue)
    counterpart.value = control.value;
}

/** Restore the selection of a text field. @param {HTMLInputElement} field @param {(number | null)[]} selection start and end, null for number fields, which do not report them */
function restoreSelection(field, [start, end]) {
  // A number field is selected as a whole, as if the user had moved to it with the Tab key.
  if (start === null || end === null) field.select();
  else field.setSelectionRange(start, end);
}

/** Return a function that finds the control which replaces an earlier control. @param {Element[]} earlierControls @param {Element[]} controls @returns {(control: Element) => Element | undefined} */
function createCounterpartFinder(earlierControls, controls) {
  return (control) => {
    const description = describeControl(control);
    const index = earlierControls.filter((node) => describeControl(node) === description).indexOf(control);
    return controls.filter((node) => describeControl(node) === description)[index];
  };
}

/** Return a string that identifies a control before and after a redraw. @param {Element} node */
function describeControl(node) {
  return [node.tagName, node.id || node.ariaLabel || node.textContent].join(" ");
}
