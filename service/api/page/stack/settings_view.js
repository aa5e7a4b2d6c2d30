/** The panel with the metadata of a stack, the settings of a segmentation, and the button that starts it. */

import { button, element, field } from "../core/elements.js";
import { formatBytes, formatCount, formatDuration, formatNumber } from "../core/format.js";
import { request } from "../core/requests.js";
import { SETTING_TITLES, toPageTerms } from "../core/terminology.js";
import { AXIS_LEGEND, MetadataControls } from "./metadata_controls.js";

/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {import("../core/requests.js").Problem} Problem */
/** @typedef {Record<string, string>} Parameters values by parameter name; empty values are not sent */

/** @typedef {{name: string, title: string, placeholder?: string, choices?: [string, string][]}} Option */

/** Rarely needed parameters. Parameters that the service does not support are hidden. @type {Option[]} */
const ADVANCED_OPTIONS = [
  { name: "threshold", title: SETTING_TITLES.threshold, placeholder: "model default, or 0 to 1" },
  { name: "minimum_size", title: SETTING_TITLES.minimum_size, placeholder: "in voxels, or as 12.5um3" },
  { name: "min_confidence", title: SETTING_TITLES.min_confidence, placeholder: "model default, or 0 to 1" },
  {
    name: "border",
    title: SETTING_TITLES.border,
    choices: [
      ["", "model default"],
      ["keep", "keep"],
      ["drop", "remove"],
    ],
  },
  {
    name: "fill_holes",
    title: SETTING_TITLES.fill_holes,
    choices: [
      ["", "model default"],
      ["true", "fill"],
      ["false", "keep"],
    ],
  },
  {
    name: "quality",
    title: "Quality",
    choices: [
      ["", "fast"],
      ["best", "best (about ten times slower)"],
    ],
  },
  { name: "overlap", title: SETTING_TITLES.overlap, placeholder: "0.25" },
  { name: "skip_below", title: SETTING_TITLES.skip_below, placeholder: "auto, none, or a gray value" },
];

/** Events: `change` when a setting has changed, `run` when the user presses Segment. */
export class SettingsView extends EventTarget {
  /**
   * @param {HTMLElement} root
   * @param {{models: Model[], defaultModel: string | null, parameters: Set<string>}} service parameters: their names
   */
  constructor(root, { models, defaultModel, parameters }) {
    super();
    this.supportedParameters = parameters;
    /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
    this.optional = new Map();
    this.models = models.filter((model) => model.input);
    /** @type {Parameters} */
    this.parameters = { model: defaultModel ?? this.models[0]?.name ?? "" };
    this.facts = element("div", { class: "facts" });
    this.notes = element("ul", { class: "notes" });
    this.controls = element("div", { class: "controls" });
    this.run = button("Segment", () => this.dispatchEvent(new Event("run")), "primary wide");
    // Enabled once the service has inspected the stack.
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
    this.metadata = new MetadataControls(this.models, (changes) => this.#change(changes));
    this.controls.append(this.metadata.root, this.settings);
    /** @type {Inspection | null} */
    this.inspection = null;
  }

  /** @param {string} name @param {number} bytes */
  setName(name, bytes) {
    this.name.textContent = name;
    this.name.title = name;
    this.bytes = bytes;
  }

  /** @param {Parameters} changes */
  #change(changes) {
    Object.assign(this.parameters, changes);
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
      { "aria-label": "How the object diameter is determined", onchange: () => this.#readDiameter() },
      element("option", { value: "" }, "model default"),
      element("option", { value: "auto" }, "estimated from the stack"),
      element("option", { value: "px" }, "custom, in voxels"),
      element("option", { value: "none" }, "original resolution"),
    );
    this.diameter = element("input", {
      type: "number",
      min: "1",
      step: "0.5",
      value: "15",
      "aria-label": "Object diameter in voxels",
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
        element("summary", {}, "More settings"),
        ...ADVANCED_OPTIONS.filter(({ name }) => this.supportedParameters.has(name)).map((option) =>
          this.#makeOption(option),
        ),
      ),
    );
  }

  /** @param {Option} option */
  #makeOption({ name, title, placeholder, choices }) {
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

  /** The custom diameter in voxels, null if none is set. */
  get customDiameter() {
    return this.diameterKind?.value === "px" ? Number(this.diameter?.value) || null : null;
  }

  /** Set a custom diameter, such as one dragged in the view. @param {number} voxels */
  setDiameter(voxels) {
    if (!this.diameter || !this.diameterKind) return;
    this.diameterKind.value = "px";
    this.diameter.value = String(voxels);
    this.#readDiameter();
  }

  /** Show the parameters of an earlier job. @param {Parameters} parameters */
  restore(parameters) {
    this.parameters = parameters;
    if (this.model) this.model.value = parameters.model;
    for (const [name, control] of this.optional) control.value = parameters[name] ?? "";
    const diameter = parameters.diameter ?? "";
    const custom = /^([\d.]+)px$/.exec(diameter);
    if (!this.diameterKind || !this.diameter) return;
    this.diameterKind.value = custom ? "px" : diameter;
    if (this.diameterKind.selectedIndex < 0) this.diameterKind.append(new Option(diameter, diameter, true, true));
    this.diameter.hidden = !custom;
    if (custom) this.diameter.value = custom[1];
  }

  /** Explain that the service no longer stores the stack of a job. */
  showMissingStack() {
    this.run.disabled = true;
    this.controls.hidden = true;
    this.estimate.textContent =
      "This stack is no longer stored on the service, so only its labels are shown. To segment it again, open the file again.";
  }

  /** @param {Inspection} inspection */
  show(inspection) {
    this.inspection = inspection;
    this.settings.hidden = false;
    // The views show one time point. Set it explicitly, so that the displayed and the segmented time point agree.
    if (inspection.file.times > 1 && !this.parameters.time) this.#change({ time: "0" });
    const { file } = inspection;
    const [, z, y, x] = file.shape;
    const edges = file.voxel_size;
    this.facts.replaceChildren(
      chip("Size", `${x} × ${y} × ${z}`, "voxels along x, y, z"),
      chip(
        "Voxel size",
        edges ? `${formatNumber(edges.x)} × ${formatNumber(edges.y)} × ${formatNumber(edges.z)} µm` : "unknown",
        file.voxel_size_from,
        !edges,
      ),
      chip("Axes", file.axes, `${file.container}. ${AXIS_LEGEND}`),
      chip("Pixels", file.dtype, this.bytes ? formatBytes(this.bytes) : ""),
      ...(file.channels.length > 1
        ? [chip("Channels", String(file.channels.length), file.channels.filter(Boolean).join(", "))]
        : []),
      ...(file.times > 1 ? [chip("Time points", String(file.times))] : []),
    );
    this.notes.replaceChildren(...file.notes.map((note) => element("li", {}, toPageTerms(note))));
    this.metadata.show(file, this.parameters);
    const model = this.models.find((each) => each.name === this.parameters.model);
    if (this.summary) this.summary.textContent = model?.summary ?? "";
    this.#showExample(model);
    const { estimate } = inspection;
    this.run.disabled = inspection.problem !== null;
    this.estimate.classList.toggle("warning-text", inspection.problem !== null);
    const needsChannel = inspection.problem !== null && file.channels.length > 1 && !this.parameters.channel;
    const problem = needsChannel
      ? "Select the channel to segment."
      : inspection.problem && toPageTerms(inspection.problem);
    this.controls.querySelector("#channel")?.closest(".field")?.classList.toggle("required", needsChannel);
    this.estimate.textContent = problem ?? (estimate ? describeEstimate(estimate, inspection.seconds) : "");
  }

  /** Show why the service cannot read the stack, and offer to set its axes. @param {Problem} problem */
  showProblem(problem) {
    this.run.disabled = true;
    // Before the first successful inspection, the side panel shows the message.
    this.estimate.textContent = this.inspection ? problem.message : "";
    this.estimate.classList.add("warning-text");
    const isAxesProblem = this.metadata.askAxes(problem, this.parameters);
    if (!this.inspection) this.settings.hidden = !isAxesProblem;
  }

  /** Show an example of the objects that a model segments. @param {Model | undefined} model */
  async #showExample(model) {
    const { example } = this;
    if (!example || example.dataset.model === model?.name) return;
    example.dataset.model = model?.name ?? "";
    example.hidden = true;
    if (!model?.picture) return;
    // Fetched by script, because an image element could not send the API key.
    const picture = await request(model.picture.slice(1)).then(
      (response) => response.blob(),
      () => null,
    );
    if (!picture || example.dataset.model !== model.name) return;
    URL.revokeObjectURL(example.src);
    example.src = URL.createObjectURL(picture);
    example.alt = `Example of objects segmented with ${model.name}`;
    example.hidden = false;
  }
}

/** @param {string} name @param {string} value @param {string} [hint] @param {boolean} [isUncertain] */
function chip(name, value, hint = "", isUncertain = false) {
  return element(
    "div",
    { class: isUncertain ? "chip uncertain" : "chip", title: hint },
    element("span", { class: "chip-name" }, name),
    element("span", { class: "chip-value" }, value),
  );
}

/** @param {NonNullable<Inspection["estimate"]>} estimate @param {number | null} seconds until the labels are ready */
function describeEstimate(estimate, seconds) {
  const time = seconds === null ? "" : `${seconds < 1 ? "" : "about "}${formatDuration(seconds)}, `;
  return `${time}${formatCount(estimate.windows, "window")}, ${formatBytes(estimate.host_bytes + estimate.device_bytes)} of memory`;
}
