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
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return made;
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

/** @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
