/** Controls for metadata that a file does not specify, or that the user can override: axes, channel, time points, voxel size. */

import { button, element, field, redraw } from "../core/elements.js";
import { SETTING_TITLES } from "../core/terminology.js";
import { isRange } from "../volumes/time_points.js";
import { channelPreviews, nameOf } from "./channels.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("./settings_view.js").Parameters} Parameters */

/** Likely axes of a file, by number of dimensions. @type {Record<number, string[]>} */
const LIKELY_AXES = {
  2: ["YX"],
  3: ["ZYX", "TYX", "CYX"],
  4: ["CZYX", "ZCYX", "TZYX", "TCYX"],
  5: ["TZCYX", "TCZYX"],
  6: ["TZCYXS"],
};

/** The meaning of the axis letters. */
export const AXIS_LEGEND = "T: time, Z: depth, C: channel, Y: row, X: column, S: color sample";

export class MetadataControls {
  /** @param {import("openapi").ModelInfo[]} models @param {(changes: Parameters) => void} change called with the parameters that the user changed */
  constructor(models, change) {
    this.models = models;
    this.change = change;
    this.root = element("div", { class: "metadata-controls" });
    /** @type {Parameters} */
    this.parameters = {};
    /** Fetches a small plane from the middle of a channel. @type {((channel: number) => Promise<import("../volumes/planes.js").Volume>) | null} */
    this.fetchMiddle = null;
    /** Previews of the channels, created once per interpretation of the axes. */
    this.previews = { axes: "", root: element("div") };
  }

  /** @param {Description} file as the service interprets it @param {Parameters} parameters */
  show(file, parameters) {
    this.parameters = parameters;
    redraw(this.root, () => this.#createControls(file));
  }

  /**
   * Ask for the axes of a stack that cannot be read without them.
   * @param {import("../core/requests.js").Problem} problem @param {Parameters} parameters
   * @returns {boolean} false if the problem has another cause than the axes
   */
  askAxes(problem, parameters) {
    /** @type {string | undefined} */
    const suggested = problem.suggested.axes;
    const dimensions = suggested?.length ?? parameters.axes?.length ?? 0;
    const choices = problem.slug === "ambiguous-axes" || parameters.axes ? (LIKELY_AXES[dimensions] ?? []) : [];
    const options = suggested ? [suggested, ...choices.filter((axes) => axes !== suggested)] : choices;
    const isAxesProblem = problem.slug === "ambiguous-axes" || options.length > 0;
    if (!isAxesProblem) return false;
    redraw(this.root, () => [
      element(
        "div",
        { class: "question", role: "group", "aria-label": "Axes of the file" },
        element("p", {}, problem.message),
        element("p", { class: "muted small" }, AXIS_LEGEND),
        element(
          "div",
          { class: "row" },
          ...options.map((axes) => button(axes, () => this.change({ axes }), "secondary")),
        ),
        problem.slug === "ambiguous-axes" &&
          field(
            "Other axes",
            element("input", {
              type: "text",
              maxLength: 6,
              placeholder: "one letter per dimension",
              onchange: (/** @type {Event} */ event) =>
                this.change({ axes: /** @type {HTMLInputElement} */ (event.target).value.trim().toUpperCase() }),
            }),
          ),
      ),
    ]);
    return true;
  }

  /** @param {Description} file @returns {import("../core/elements.js").Child[]} */
  #createControls(file) {
    const parts = [];
    if (file.channels.length > 1) parts.push(this.#channelField(file), this.#channelPreviews(file));
    if (file.times > 1) parts.push(...this.#timeFields(file));
    parts.push(this.#voxelField(file));
    const selected = this.parameters.axes ?? "";
    // Pages interpreted as planes may be time points or channels.
    if (selected || file.times > 1 || file.notes.some((note) => note.includes("axes=")))
      parts.push(this.#axesField(file, selected));
    return parts;
  }

  /** @param {Description} file @param {string} selected axes, "" if the file's own axes are used */
  #axesField(file, selected) {
    const likely = (LIKELY_AXES[file.axes.length] ?? []).filter(
      (axes) => axes !== selected && (selected || axes !== file.axes),
    );
    const options = selected ? [selected, ...likely] : likely;
    return field(
      SETTING_TITLES.axes,
      element(
        "select",
        {
          id: "axes",
          // With other axes, the selected channel and time points may not exist.
          onchange: (/** @type {Event} */ event) =>
            this.change({
              axes: /** @type {HTMLSelectElement} */ (event.target).value,
              channel: "",
              time: "",
              link: "",
            }),
        },
        element("option", { value: "" }, selected ? "as in the file" : `${file.axes}, as in the file`),
        ...options.map((axes) => element("option", { value: axes, selected: axes === selected }, axes)),
      ),
      element("span", { class: "muted small" }, AXIS_LEGEND),
    );
  }

  /** @param {Description} file */
  #channelField(file) {
    const { channel } = this.parameters;
    const inputChannels = this.models.find((model) => model.name === this.parameters.model)?.input?.channels ?? 1;
    const placeholder = inputChannels > 1 ? "all channels" : "select one";
    const select = element(
      "select",
      { id: "channel", onchange: () => this.change({ channel: select.value }) },
      (inputChannels > 1 || !channel) && element("option", { value: "", selected: !channel }, placeholder),
      ...file.channels.map((name, index) => {
        const text = name ? `${index}: ${name}` : nameOf(file, index);
        return element("option", { value: String(index), selected: channel === String(index) }, text);
      }),
    );
    return field(SETTING_TITLES.channel, select);
  }

  /** @param {Description} file */
  #channelPreviews(file) {
    const { channel } = this.parameters;
    const selected = channel === undefined || channel === "" ? -1 : Number(channel);
    const { previews, fetchMiddle } = this;
    const axes = `${file.axes} ${file.stored_shape}`;
    if (previews.axes !== axes && fetchMiddle) {
      const select = (/** @type {number} */ index) => this.change({ channel: String(index) });
      this.previews = { axes, root: channelPreviews(file, selected, fetchMiddle, select) };
    }
    const { root } = this.previews;
    for (const [index, preview] of [...root.children].entries())
      preview.setAttribute("aria-pressed", String(index === selected));
    return root;
  }

  /** Controls for one time point, a range of them, or all. @param {Description} file */
  #timeFields(file) {
    const time = this.parameters.time ?? "0";
    const isSeries = isRange(time);
    const [first, stop] = time === "all" ? ["", ""] : time.split(":");
    /** @param {string} id @param {string} value @param {string} label */
    const numeric = (id, value, label) =>
      element("input", {
        type: "number",
        id,
        min: "0",
        max: String(file.times - 1),
        value,
        "aria-label": label,
        onchange: () => this.change({ time: readTime() }),
      });
    const single = numeric("time", first || "0", "Time point");
    const from = numeric("time-from", first || "0", "First time point");
    const last = numeric("time-last", String(Number(stop || file.times) - 1), "Last time point");
    const kind = element(
      "select",
      {
        id: "times",
        "aria-label": "Time points",
        onchange: () => this.change(kind.value === "one" ? { time: readTime(), link: "" } : { time: readTime() }),
      },
      ...[
        ["one", "one"],
        ["some", "from … to"],
        ["all", `all ${file.times}`],
      ].map(([value, text]) =>
        element("option", { value, selected: value === (isSeries ? (time === "all" ? "all" : "some") : "one") }, text),
      ),
    );
    const readTime = () => {
      if (kind.value === "all") return "all";
      if (kind.value === "one") return single.value || "0";
      const begin = Math.min(Number(from.value), file.times - 1);
      return `${begin}:${Math.max(begin, Math.min(Number(last.value), file.times - 1)) + 1}`;
    };
    const link = element("input", {
      type: "checkbox",
      id: "link",
      checked: this.parameters.link === "overlap",
      onchange: () => this.change({ link: link.checked ? "overlap" : "" }),
    });
    const inputs = isSeries ? time !== "all" && element("div", { class: "row tight" }, from, "to", last) : single;
    return [
      field(
        "Time points",
        element("div", { class: "row tight" }, kind, inputs),
        element("span", { class: "muted small" }, `0 to ${file.times - 1}`),
      ),
      ...(isSeries ? [element("label", { class: "slim" }, link, "Track objects over time")] : []),
    ];
  }

  /** @param {Description} file */
  #voxelField(file) {
    const edges = file.voxel_size;
    const inputs = /** @type {const} */ (["x", "y", "z"]).map((axis) =>
      element("input", {
        type: "number",
        min: "0",
        step: "any",
        value: edges ? String(Number(edges[axis].toPrecision(5))) : "",
        placeholder: axis,
        "aria-label": `Voxel size along ${axis} in micrometers`,
        onchange: () => {
          const [x, y, z] = inputs.map((input) => input.value);
          if (Number(x) > 0 && Number(y) > 0 && Number(z) > 0) this.change({ voxel_size: `${z},${y},${x}` });
        },
      }),
    );
    return element(
      "fieldset",
      { class: edges ? "field voxel-size" : "field voxel-size required" },
      element("legend", { class: "field-name" }, "Voxel size x, y, z in µm"),
      element("div", { class: "row tight" }, ...inputs),
    );
  }
}
