/** What was understood of a stack, with a control for everything that a file leaves open, and the button that runs it. */

import { button, element, field } from "../core/elements.js";
import { counted, duration, number, size } from "../core/format.js";
import { request } from "../core/requests.js";
import { pageWords, SETTINGS } from "../core/words.js";
import { OpenQuestions } from "./open_questions.js";

/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {import("../core/requests.js").Problem} Problem */
/** @typedef {Record<string, string>} Parameters by the names of the service; what is empty is not sent */

/** @typedef {{name: string, title: string, placeholder?: string, choices?: [string, string][]}} Optional */

/** Parameters that few need; those that the service does not know are left out. @type {Optional[]} */
const OPTIONAL = [
  { name: "threshold", title: SETTINGS.threshold, placeholder: "as the model says, 0 to 1" },
  { name: "minimum_size", title: SETTINGS.minimum_size, placeholder: "voxels, or 12.5um3" },
  { name: "min_confidence", title: SETTINGS.min_confidence, placeholder: "as the model says, 0 to 1" },
  {
    name: "border",
    title: SETTINGS.border,
    choices: [
      ["", "as the model says"],
      ["keep", "keep"],
      ["drop", "drop"],
    ],
  },
  {
    name: "fill_holes",
    title: SETTINGS.fill_holes,
    choices: [
      ["", "as the model says"],
      ["true", "fill"],
      ["false", "leave"],
    ],
  },
  {
    name: "quality",
    title: "Quality",
    choices: [
      ["", "fast"],
      ["best", "best, ten times slower"],
    ],
  },
  { name: "overlap", title: SETTINGS.overlap, placeholder: "0.25" },
  { name: "skip_below", title: SETTINGS.skip_below, placeholder: "auto, none or a grey value" },
];

export class SettingsView extends EventTarget {
  /**
   * @param {HTMLElement} root
   * @param {{models: Model[], defaultModel: string | null, parameters: Set<string>}} service parameters: their names
   */
  constructor(root, { models, defaultModel, parameters }) {
    super();
    this.known = parameters;
    /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
    this.optional = new Map();
    this.models = models.filter((model) => model.input);
    /** @type {Parameters} */
    this.parameters = { model: defaultModel ?? this.models[0]?.name ?? "" };
    this.facts = element("div", { class: "facts" });
    this.notes = element("ul", { class: "notes" });
    this.controls = element("div", { class: "controls" });
    this.run = button("Segment", () => this.dispatchEvent(new Event("run")), "primary wide");
    // What is understood of the stack decides about the request.
    this.run.disabled = true;
    this.estimate = element("p", { class: "muted", "aria-live": "polite" });
    this.name = element("h2", { class: "stack-name" });
    root.replaceChildren(
      this.name,
      this.facts,
      this.notes,
      this.controls,
      element("div", { class: "run-box" }, this.estimate, this.run),
    );
    this.settings = this.#makeSettings();
    this.questions = new OpenQuestions(this.models, (changed) => this.#change(changed));
    this.controls.append(this.questions.root, this.settings);
    /** @type {Inspection | null} */
    this.inspection = null;
  }

  /** @param {string} name @param {number} bytes */
  setName(name, bytes) {
    this.name.textContent = name;
    this.name.title = name;
    this.bytes = bytes;
  }

  /** @param {Parameters} changed */
  #change(changed) {
    Object.assign(this.parameters, changed);
    this.dispatchEvent(new Event("change"));
  }

  #makeSettings() {
    this.summary = element("p", { class: "muted small" });
    this.example = element("img", { class: "example", alt: "", hidden: true });
    this.model = element(
      "select",
      { onchange: () => this.#change({ model: this.model?.value ?? "" }) },
      ...this.models.map((model) =>
        element("option", { value: model.name, selected: model.name === this.parameters.model }, model.name),
      ),
    );
    this.diameterKind = element(
      "select",
      { "aria-label": "How the diameter is found", onchange: () => this.#readDiameter() },
      element("option", { value: "" }, "as the model suggests"),
      element("option", { value: "auto" }, "estimated from the stack"),
      element("option", { value: "px" }, "as I state it"),
      element("option", { value: "none" }, "as sampled"),
    );
    this.diameter = element("input", {
      type: "number",
      min: "1",
      step: "0.5",
      value: "15",
      "aria-label": "Diameter in voxels",
      hidden: true,
      onchange: () => this.#readDiameter(),
    });
    return element(
      "div",
      {},
      field("Model", this.model, this.summary),
      this.example,
      field("Object diameter", element("div", { class: "row tight" }, this.diameterKind, this.diameter)),
      element(
        "details",
        {},
        element("summary", {}, "More"),
        ...OPTIONAL.filter(({ name }) => this.known.has(name)).map((option) => this.#makeOptional(option)),
      ),
    );
  }

  /** @param {Optional} option */
  #makeOptional({ name, title, placeholder, choices }) {
    const onchange = () => this.#change({ [name]: control.value.trim() });
    const control = choices
      ? element("select", { onchange }, ...choices.map(([value, text]) => element("option", { value }, text)))
      : element("input", { type: "text", placeholder, autocomplete: "off", onchange });
    this.optional.set(name, control);
    return field(title, control);
  }

  #readDiameter() {
    const kind = this.diameterKind?.value ?? "";
    if (this.diameter) this.diameter.hidden = kind !== "px";
    this.#change({ diameter: kind === "px" ? `${this.diameter?.value}px` : kind });
  }

  /** The stated diameter in voxels, null where there is none. */
  get statedDiameter() {
    return this.diameterKind?.value === "px" ? Number(this.diameter?.value) || null : null;
  }

  /** @param {number} pixels as dragged on the picture */
  setDiameter(pixels) {
    if (!this.diameter || !this.diameterKind) return;
    this.diameterKind.value = "px";
    this.diameter.value = String(pixels);
    this.#readDiameter();
  }

  /** Show the parameters of an earlier job. @param {Parameters} parameters */
  restore(parameters) {
    this.parameters = parameters;
    if (this.model) this.model.value = parameters.model;
    for (const [name, control] of this.optional) control.value = parameters[name] ?? "";
    const diameter = parameters.diameter ?? "";
    const stated = /^([\d.]+)px$/.exec(diameter);
    if (!this.diameterKind || !this.diameter) return;
    this.diameterKind.value = stated ? "px" : diameter;
    if (this.diameterKind.selectedIndex < 0) this.diameterKind.append(new Option(diameter, diameter, true, true));
    this.diameter.hidden = !stated;
    if (stated) this.diameter.value = stated[1];
  }

  /** Say that the stack of a job is not kept any more. */
  lose() {
    this.run.disabled = true;
    this.controls.hidden = true;
    this.estimate.textContent =
      "The service does not keep this stack any more: the labels are shown alone. Drop the file again to segment it anew.";
  }

  /** @param {Inspection} inspection */
  show(inspection) {
    this.inspection = inspection;
    this.settings.hidden = false;
    // The views show one volume; the control names the time point, so that nothing is chosen unseen.
    if (inspection.file.times > 1 && !this.parameters.time) this.#change({ time: "0" });
    const { file } = inspection;
    const [, z, y, x] = file.shape;
    const edges = file.voxel_size;
    this.facts.replaceChildren(
      chip("Size", `${x} × ${y} × ${z}`, "voxels along x, y, z"),
      chip(
        "Voxel",
        edges ? `${number(edges.x)} × ${number(edges.y)} × ${number(edges.z)} µm` : "not stated",
        file.voxel_size_from,
        !edges,
      ),
      chip("Axes", file.axes, file.container),
      chip("Pixels", file.dtype, this.bytes ? size(this.bytes) : ""),
      ...(file.channels.length > 1
        ? [chip("Channels", String(file.channels.length), file.channels.filter(Boolean).join(", "))]
        : []),
      ...(file.times > 1 ? [chip("Time points", String(file.times))] : []),
    );
    this.notes.replaceChildren(...file.notes.map((note) => element("li", {}, pageWords(note))));
    this.questions.show(file, this.parameters);
    const model = this.models.find((each) => each.name === this.parameters.model);
    if (this.summary) this.summary.textContent = model?.summary ?? "";
    this.#showExample(model);
    const { estimate } = inspection;
    this.run.disabled = inspection.problem !== null;
    this.estimate.classList.toggle("warning-text", inspection.problem !== null);
    const undecided = inspection.problem !== null && file.channels.length > 1 && !this.parameters.channel;
    const problem = undecided ? "Choose the channel to segment." : inspection.problem && pageWords(inspection.problem);
    this.controls.querySelector("#channel")?.closest(".field")?.classList.toggle("wanted", undecided);
    this.estimate.textContent = problem ?? (estimate ? describe(estimate, inspection.seconds) : "");
  }

  /** Offer what settles a stack that the service cannot read as it is. @param {Problem} problem */
  refuse(problem) {
    this.run.disabled = true;
    // Where nothing has been understood of the file yet, the other side of the page says why.
    this.estimate.textContent = this.inspection ? problem.message : "";
    this.estimate.classList.add("warning-text");
    const asked = this.questions.askAxes(problem, this.parameters);
    if (!this.inspection) this.settings.hidden = !asked;
  }

  /** Show what a model finds in its sample. @param {Model | undefined} model */
  async #showExample(model) {
    const { example } = this;
    if (!example || example.dataset.model === model?.name) return;
    example.dataset.model = model?.name ?? "";
    example.hidden = true;
    if (!model?.picture) return;
    // Relative to the page; an address in the document could not carry the key.
    const picture = await request(model.picture.slice(1)).then(
      (found) => found.blob(),
      () => null,
    );
    if (!picture || example.dataset.model !== model.name) return;
    URL.revokeObjectURL(example.src);
    example.src = URL.createObjectURL(picture);
    example.alt = `Objects that ${model.name} finds in its sample`;
    example.hidden = false;
  }
}

/** @param {string} name @param {string} value @param {string} [hint] @param {boolean} [doubtful] */
function chip(name, value, hint = "", doubtful = false) {
  return element(
    "div",
    { class: doubtful ? "chip doubtful" : "chip", title: hint },
    element("span", { class: "chip-name" }, name),
    element("span", { class: "chip-value" }, value),
  );
}

/** @param {NonNullable<Inspection["estimate"]>} estimate @param {number | null} seconds until the labels are there */
function describe(estimate, seconds) {
  const time = seconds === null ? "" : `${seconds < 1 ? "" : "about "}${duration(seconds)}, `;
  return `${time}${counted(estimate.windows, "window")}, ${size(estimate.host_bytes + estimate.device_bytes)} of memory`;
}
