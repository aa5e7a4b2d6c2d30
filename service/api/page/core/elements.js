/** Small helpers that make elements; text is always text, never markup. */

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [properties] of the element; `class`, `aria-...` and `data-...` become attributes, `on...` listeners
 * @param {Child[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") {
      made.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name in made && name !== "list") {
      Reflect.set(made, name, value);
    } else {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  made.append(...children.filter(isShown).map(asNode));
  return made;
}

/** @param {Child} child */
function isShown(child) {
  return child !== null && child !== undefined && child !== false;
}

/** @param {Child} child @returns {Node} */
function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`There is no element ${id}.`);
  return found;
}

/**
 * A button that looks busy, and does nothing else, until its action is done.
 * @param {string} text @param {() => unknown} action @param {string} [kind]
 */
export function button(text, action, kind = "") {
  const onclick = async () => {
    if (made.ariaBusy === "true") return;
    made.ariaBusy = "true";
    try {
      await action();
    } finally {
      made.ariaBusy = null;
    }
  };
  const made = element("button", { type: "button", class: kind, onclick }, text);
  return made;
}

/**
 * A label with a control and, below it, a hint.
 * @param {string} text
 * @param {HTMLElement} control
 * @param {Child} [hint]
 */
export function field(text, control, hint) {
  return element("label", { class: "field" }, element("span", { class: "field-name" }, text), control, hint);
}

/**
 * A dialog of the page's own, that is removed when it closes.
 * @param {string} title @param {(Node | false)[]} content
 * @returns {HTMLDialogElement}
 */
export function openDialog(title, ...content) {
  const heading = element("h2", { id: "dialog-title" }, title);
  const dialog = element("dialog", { class: "wide-dialog", "aria-labelledby": heading.id }, heading, ...content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A list of keys, or what else can be done, with what they do. @param {string[][]} keys */
export function keyList(keys) {
  const parts = keys.flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]);
  return element("dl", { class: "keys" }, ...parts);
}

/** @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** The control with text or a place that is not taken over yet, and the one under a pressed pointer: both stay as they are. */
const held = { typed: /** @type {EventTarget | null} */ (null), pressed: /** @type {EventTarget | null} */ (null) };
/** What is drawn once nobody holds anything there. @type {Map<HTMLElement, () => Child[]>} */
const later = new Map();
const FOCUSABLE = "input, select, textarea, button, summary, a[href], [tabindex]";

/** @param {keyof typeof held} how @param {EventTarget | null} what */
function hold(how, what) {
  held[how] = what;
  // First whatever is clicked does its work, and whatever follows has the focus.
  if (what === null && later.size > 0) setTimeout(drawLater);
}

function drawLater() {
  for (const [root, draw] of [...later]) redraw(root, draw);
}

document.addEventListener("input", ({ target }) => hold("typed", target));
document.addEventListener("pointerdown", ({ target }) => hold("pressed", target), true);
for (const over of ["change", "focusout"]) document.addEventListener(over, () => hold("typed", null));
for (const over of ["pointerup", "pointercancel"]) document.addEventListener(over, () => hold("pressed", null), true);

/**
 * Draw an element's children anew. Where somebody types or presses a button among them, that is waited for; the focus stays on
 * the control that has the same id, name or words.
 * @param {HTMLElement} root @param {() => Child[]} draw
 */
export function redraw(root, draw) {
  later.delete(root);
  if ([held.typed, held.pressed].some((one) => one instanceof Node && one !== root && root.contains(one))) {
    later.set(root, draw);
    return;
  }
  const focused = document.activeElement;
  const alike = () => [...root.querySelectorAll(FOCUSABLE)].filter((one) => nameOf(one) === nameOf(focused));
  const place = focused === null ? -1 : alike().indexOf(focused);
  root.replaceChildren(...draw().filter(isShown).map(asNode));
  const again = alike()[place];
  if (again instanceof HTMLElement) again.focus({ preventScroll: true });
}

/** @param {Element | null} one */
function nameOf(one) {
  return one && [one.tagName, one.id || one.ariaLabel || one.textContent].join(" ");
}
