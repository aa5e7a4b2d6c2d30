/** Panel with the metadata of a stack, the settings of the segmentation, and the button that starts the segmentation. */

import { button, element, field, formatMessage } from "../core/elements.js";
import { formatBytes, formatDuration, formatNumber } from "../core/format.js";
import { formatLengths, SETTING_TITLES, toPageTerms } from "../core/terminology.js";
import { AXIS_LEGEND, MetadataControls } from "./metadata_controls.js";

/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {import("../core/requests.js").Problem} Problem */
/** @typedef {Record<string, string>} Parameters values by parameter name; parameters with empty values are not sent */

/** @typedef {{name: string, title: string, placeholder?: string, choices?: [string, string][]}} AdvancedOption */

const DIAMETER_HINT =
  "Drag the circle in the XY view to the size of an object. Or hold Shift and draw a line across an object.";

/** Memory below this size concerns no user. */
const MIN_NOTABLE_BYTES = 2 ** 30;

/** Rarely needed parameters. Parameters that the service does not support are hidden. @type {AdvancedOption[]} */
const ADVANCED_OPTIONS = [
  { name: "threshold", title: SETTING_TITLES.threshold, placeholder: "model default, or 0 to 1" },
  { name: "minimum_size", title: SETTING_TITLES.minimum_size, placeholder: "500 voxels, or 12.5um3" },
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
    title: SETTING_TITLES.quality,
    choices: [
      ["", "fast"],
      ["best", "best (about ten times slower)"],
    ],
  },
  { name: "overlap", title: SETTING_TITLES.overlap, placeholder: "0.25" },
  { name: "skip_below", title: SETTING_TITLES.skip_below, placeholder: "auto, none, or a gray value" },
];

const TEMPORARY_JOBS_NOTE =
  "This service deletes stacks and results when it stops or restarts. Export the results that you need.";

/** Panel that dispatches `change` when a setting has changed, `run` or `annotate` when the user presses Segment or Annotate, and `gallery` when the user wants to compare the models. */
export class SettingsView extends EventTarget {
  /**
   * @param {HTMLElement} root
   * @param {{models: Model[], defaultModel: string | null, parameterNames: Set<string>, capabilities: {temporary_jobs: boolean}}} service
   */
  constructor(root, { models, defaultModel, parameterNames, capabilities }) {
    super();
    /** Whether the service no longer stores the stack. */
    this.isStackMissing = false;
    this.supportedParameters = parameterNames;
    /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
    this.optionControls = new Map();
    this.models = models.filter((model) => model.input);
    /** @type {Parameters} */
    this.parameters = { model: defaultModel ?? this.models[0]?.name ?? "" };
    this.properties = element("div", { class: "properties" });
    this.notes = element("ul", { class: "notes" });
    this.controls = element("div", { class: "controls" });
    this.runButton = button("Segment", () => this.dispatchEvent(new Event("run")), "primary wide");
    // Enabled once the service has inspected the stack.
    this.runButton.disabled = true;
    this.annotateButton = button("Annotate by hand", () => this.dispatchEvent(new Event("annotate")), "secondary wide");
    this.annotateButton.disabled = true;
    this.estimateText = element("p", { class: "muted", "aria-live": "polite" });
    this.nameHeading = element("h2", { class: "stack-name" });
    root.replaceChildren(
      this.nameHeading,
      this.properties,
      this.notes,
      this.controls,
      element(
        "div",
        { class: "run-box" },
        this.estimateText,
        this.runButton,
        this.annotateButton,
        capabilities.temporary_jobs && element("p", { class: "muted small" }, TEMPORARY_JOBS_NOTE),
      ),
    );
    this.settings = this.#createSettings();
    this.metadata = new MetadataControls(this.models, (changes) => this.#changeParameters(changes));
    this.controls.append(this.metadata.root, this.settings);
    /** @type {Inspection | null} */
    this.inspection = null;
  }

  /** @param {string} name @param {number} bytes */
  setNameAndSize(name, bytes) {
    this.nameHeading.textContent = name;
    this.nameHeading.title = name;
    this.bytes = bytes;
  }

  /** @param {Parameters} changes */
  #changeParameters(changes) {
    Object.assign(this.parameters, changes);
    this.dispatchEvent(new Event("change"));
  }

  #createSettings() {
    this.modelSummary = element("p", { class: "muted small" });
    this.galleryButton = button("Compare the models", () => this.dispatchEvent(new Event("gallery")), "link");
    this.modelSelect = element(
      "select",
      { onchange: () => this.#changeParameters({ model: this.modelSelect?.value ?? "" }) },
      ...this.models.map((model) =>
        element("option", { value: model.name, selected: model.name === this.parameters.model }, model.name),
      ),
    );
    this.diameterSelect = element(
      "select",
      { "aria-label": "How the object diameter is determined", onchange: () => this.#applyDiameter() },
      element("option", { value: "" }, "model default"),
      element("option", { value: "auto" }, "estimated from the stack"),
      element("option", { value: "px" }, "custom"),
      element("option", { value: "none" }, "original resolution"),
    );
    this.diameterInput = element("input", {
      type: "number",
      min: "1",
      step: "0.5",
      value: "15",
      "aria-label": "Object diameter in voxels",
      hidden: true,
      oninput: () => Number(this.diameterInput?.value) > 0 && this.#applyDiameter(),
    });
    this.diameterUnit = element("span", { class: "muted", hidden: true }, "voxels");
    this.diameterHint = element("span", { class: "muted small", hidden: true }, DIAMETER_HINT);
    return element(
      "div",
      {},
      field("Model", this.modelSelect, this.modelSummary),
      this.galleryButton,
      field(
        "Object diameter",
        element("div", { class: "row tight" }, this.diameterSelect, this.diameterInput, this.diameterUnit),
        this.diameterHint,
      ),
      element(
        "details",
        {},
        element("summary", {}, "More settings"),
        ...ADVANCED_OPTIONS.filter(({ name }) => this.supportedParameters.has(name)).map((option) =>
          this.#createOption(option),
        ),
      ),
    );
  }

  /** @param {AdvancedOption} option */
  #createOption({ name, title, placeholder, choices }) {
    const onchange = () => this.#changeParameters({ [name]: control.value.trim() });
    const control = choices
      ? element("select", { onchange }, ...choices.map(([value, text]) => element("option", { value }, text)))
      : element("input", { type: "text", placeholder, autocomplete: "off", onchange });
    this.optionControls.set(name, control);
    return field(title, control);
  }

  #applyDiameter() {
    const kind = this.diameterSelect?.value ?? "";
    this.#showDiameterInput(kind === "px");
    this.#changeParameters({ diameter: kind === "px" ? `${this.diameterInput?.value}px` : kind });
  }

  /** @param {boolean} isCustom whether the user types the diameter */
  #showDiameterInput(isCustom) {
    if (this.diameterInput) this.diameterInput.hidden = !isCustom;
    for (const node of [this.diameterUnit, this.diameterHint]) if (node) node.hidden = !isCustom;
  }

  /** The custom diameter in voxels, or null if the user has not set one. */
  get customDiameter() {
    return this.diameterSelect?.value === "px" ? Number(this.diameterInput?.value) || null : null;
  }

  /** Propose the diameter of a result as the custom diameter. @param {string} diameter as the service reports it, such as `4px` or `14,22,22px; estimated` */
  proposeDiameter(diameter) {
    const lengths = /^([\d.,]+)px/.exec(diameter)?.[1].split(",");
    if (lengths && this.diameterInput && this.customDiameter === null)
      this.diameterInput.value = String(Math.max(1, Math.round(2 * Number(lengths[lengths.length - 1])) / 2));
  }

  /** Set a custom diameter, such as the diameter that the user dragged in the view. @param {number} voxels */
  setDiameter(voxels) {
    if (!this.diameterInput || !this.diameterSelect) return;
    this.diameterSelect.value = "px";
    this.diameterInput.value = String(voxels);
    this.#applyDiameter();
  }

  /** Show the parameters of an earlier job. @param {Parameters} parameters */
  restore(parameters) {
    this.parameters = parameters;
    if (this.modelSelect) this.modelSelect.value = parameters.model;
    for (const [name, control] of this.optionControls) control.value = parameters[name] ?? "";
    const diameter = parameters.diameter ?? "";
    const customMatch = /^([\d.]+)px$/.exec(diameter);
    if (!this.diameterSelect || !this.diameterInput) return;
    this.diameterSelect.value = customMatch ? "px" : diameter;
    if (this.diameterSelect.selectedIndex < 0)
      this.diameterSelect.append(new Option(formatLengths(diameter), diameter, true, true));
    this.#showDiameterInput(customMatch !== null);
    if (customMatch) this.diameterInput.value = customMatch[1];
  }

  /** Show that the service no longer stores the stack of a job. */
  showMissingStack() {
    this.isStackMissing = this.runButton.disabled = this.annotateButton.disabled = true;
    this.controls.hidden = true;
    this.estimateText.textContent =
      "This stack is no longer stored on the server, so only its labels are shown. To segment it again, open the file again.";
  }

  /** Show the metadata of the stack and the estimated cost of the segmentation. @param {Inspection} inspection */
  show(inspection) {
    this.inspection = inspection;
    this.settings.hidden = false;
    const needsScene = inspection.file.example_scene !== null;
    // The views show one time point. Select it explicitly, so that the displayed time point is also the segmented one.
    if (inspection.file.times > 1 && !this.parameters.time) this.#changeParameters({ time: "0" });
    const { file } = inspection;
    const [, z, y, x] = file.shape;
    const voxelSize = file.voxel_size;
    this.properties.replaceChildren(
      createChip("Size", `${x} × ${y} × ${z}`, "voxels along x, y, z"),
      createChip(
        "Voxel size",
        voxelSize
          ? `${formatNumber(voxelSize.x)} × ${formatNumber(voxelSize.y)} × ${formatNumber(voxelSize.z)} µm`
          : "unknown",
        file.voxel_size_from,
        !voxelSize,
      ),
      createChip("Axes", file.axes, `${file.container}. ${AXIS_LEGEND}`),
      createChip("Pixels", file.dtype, this.bytes ? formatBytes(this.bytes) : ""),
      ...(file.channels.length > 1
        ? [createChip("Channels", String(file.channels.length), file.channels.filter(Boolean).join(", "))]
        : []),
      ...(file.times > 1 ? [createChip("Time points", String(file.times))] : []),
    );
    this.notes.replaceChildren(...file.notes.map((note) => element("li", {}, formatMessage(toPageTerms(note)))));
    this.metadata.show(file, this.parameters, needsScene);
    const model = this.models.find((candidate) => candidate.name === this.parameters.model);
    if (this.modelSummary) this.modelSummary.textContent = model?.summary ?? "";
    const { estimate } = inspection;
    this.runButton.disabled = inspection.problem !== null;
    this.annotateButton.disabled = needsScene;
    this.estimateText.classList.toggle("warning-text", inspection.problem !== null);
    const needsChannel = inspection.problem !== null && file.channels.length > 1 && !this.parameters.channel;
    const problem = needsScene
      ? "Select the scene to segment."
      : needsChannel
        ? "Select the channel to segment."
        : inspection.problem && toPageTerms(inspection.problem);
    this.controls.querySelector("#channel")?.closest(".field")?.classList.toggle("required", needsChannel);
    this.estimateText.replaceChildren(
      formatMessage(problem ?? (estimate ? describeEstimate(estimate, inspection.seconds) : "")),
    );
  }

  /** Show why the service cannot read the stack, and offer to set its axes or to use it without the missing planes. @param {Problem} problem */
  showProblem(problem) {
    this.runButton.disabled = this.annotateButton.disabled = true;
    // Before the first successful inspection, the side panel shows the message.
    this.estimateText.replaceChildren(formatMessage(this.inspection ? problem : ""));
    this.estimateText.classList.add("warning-text");
    const isAnswerable =
      this.metadata.askForIncompleteStack(problem) || this.metadata.askForAxes(problem, this.parameters);
    if (!this.inspection) this.settings.hidden = !isAnswerable;
  }
}

/** Create a labeled value. @param {string} name @param {string} value @param {string} [hint] @param {boolean} [isUncertain] whether to highlight the value, because the user should check it */
function createChip(name, value, hint = "", isUncertain = false) {
  return element(
    "div",
    { class: isUncertain ? "chip uncertain" : "chip", title: hint },
    element("span", { class: "chip-name" }, name),
    element("span", { class: "chip-value" }, value),
  );
}

/** @param {NonNullable<Inspection["estimate"]>} estimate @param {number | null} seconds estimated time until the labels are ready, null if unknown */
function describeEstimate(estimate, seconds) {
  const bytes = estimate.host_bytes + estimate.device_bytes;
  const durationText = seconds !== null && `${seconds < 1 ? "" : "about "}${formatDuration(seconds)}`;
  return [durationText, bytes >= MIN_NOTABLE_BYTES && `${formatBytes(bytes)} of memory`].filter(Boolean).join(", ");
}
