/** Controls for what a file leaves open: which axis is which, the channel, the time points, the size of a voxel. */

import { button, element, field, redraw } from "../core/elements.js";
import { SETTINGS } from "../core/words.js";
import { isRange } from "../volumes/time_points.js";
import { channelPictures, nameOf } from "./channels.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("./settings_view.js").Parameters} Parameters */

/** Likely meanings of the axes of a file, by their number. @type {Record<number, string[]>} */
const LIKELY_AXES = {
  2: ["YX"],
  3: ["ZYX", "TYX", "CYX"],
  4: ["CZYX", "ZCYX", "TZYX", "TCYX"],
  5: ["TZCYX", "TCZYX"],
  6: ["TZCYXS"],
};

export class OpenQuestions {
  /** @param {import("openapi").ModelInfo[]} models @param {(changed: Parameters) => void} change what the reader has answered */
  constructor(models, change) {
    this.models = models;
    this.change = change;
    this.root = element("div", { class: "open-questions" });
    /** Those that the answers change. @type {Parameters} */
    this.parameters = {};
    /** Fetches a small plane from the middle of a channel. @type {((channel: number) => Promise<import("../volumes/planes.js").Volume>) | null} */
    this.fetchMiddle = null;
    /** Pictures of the channels, made once for a reading of the axes. */
    this.pictures = { axes: "", root: element("div") };
  }

  /** @param {Description} file as it is understood @param {Parameters} parameters */
  show(file, parameters) {
    this.parameters = parameters;
    redraw(this.root, () => this.#ask(file));
  }

  /**
   * Ask for the axes of a stack that cannot be read without them.
   * @param {import("../core/requests.js").Problem} problem @param {Parameters} parameters
   * @returns {boolean} whether axes may be what is missing
   */
  askAxes(problem, parameters) {
    /** @type {string | undefined} */
    const suggested = problem.suggested.axes;
    const dimensions = suggested?.length ?? parameters.axes?.length ?? 0;
    const choices = problem.slug === "ambiguous-axes" || parameters.axes ? (LIKELY_AXES[dimensions] ?? []) : [];
    const all = suggested ? [suggested, ...choices.filter((axes) => axes !== suggested)] : choices;
    const askable = problem.slug === "ambiguous-axes" || all.length > 0;
    if (!askable) return false;
    redraw(this.root, () => [
      element(
        "div",
        { class: "question", role: "group", "aria-label": "What the file leaves open" },
        element("p", {}, problem.message),
        element("div", { class: "row" }, ...all.map((axes) => button(axes, () => this.change({ axes }), "secondary"))),
        problem.slug === "ambiguous-axes" &&
          field(
            "Other axes",
            element("input", {
              type: "text",
              maxLength: 6,
              placeholder: "one letter of T Z C Y X per dimension",
              onchange: (/** @type {Event} */ event) =>
                this.change({ axes: /** @type {HTMLInputElement} */ (event.target).value.trim().toUpperCase() }),
            }),
          ),
      ),
    ]);
    return true;
  }

  /** @param {Description} file @returns {import("../core/elements.js").Child[]} */
  #ask(file) {
    const parts = [];
    if (file.channels.length > 1) parts.push(this.#channelField(file), this.#channelPictures(file));
    if (file.times > 1) parts.push(...this.#timeFields(file));
    parts.push(this.#voxelField(file));
    const stated = this.parameters.axes ?? "";
    // Pages that were taken for planes may be time points or channels.
    if (stated || file.times > 1 || file.notes.some((note) => note.includes("axes=")))
      parts.push(this.#axesField(file, stated));
    return parts;
  }

  /** @param {Description} file @param {string} stated */
  #axesField(file, stated) {
    const likely = (LIKELY_AXES[file.axes.length] ?? []).filter(
      (axes) => axes !== stated && (stated || axes !== file.axes),
    );
    const others = stated ? [stated, ...likely] : likely;
    return field(
      SETTINGS.axes,
      element(
        "select",
        {
          id: "axes",
          // What was chosen of the dimensions need not be there with other ones.
          onchange: (/** @type {Event} */ event) =>
            this.change({
              axes: /** @type {HTMLSelectElement} */ (event.target).value,
              channel: "",
              time: "",
              link: "",
            }),
        },
        element("option", { value: "" }, stated ? "as in the file" : `${file.axes}, as in the file`),
        ...others.map((axes) => element("option", { value: axes, selected: axes === stated }, axes)),
      ),
    );
  }

  /** @param {Description} file */
  #channelField(file) {
    const { channel } = this.parameters;
    const wanted = this.models.find((model) => model.name === this.parameters.model)?.input?.channels ?? 1;
    const nothing = wanted > 1 ? "as many as the model takes" : "choose one";
    const select = element(
      "select",
      { id: "channel", onchange: () => this.change({ channel: select.value }) },
      (wanted > 1 || !channel) && element("option", { value: "", selected: !channel }, nothing),
      ...file.channels.map((name, index) => {
        const text = name ? `${index}: ${name}` : nameOf(file, index);
        return element("option", { value: String(index), selected: channel === String(index) }, text);
      }),
    );
    return field(SETTINGS.channel, select);
  }

  /** @param {Description} file */
  #channelPictures(file) {
    const { channel } = this.parameters;
    const chosen = channel === undefined || channel === "" ? -1 : Number(channel);
    const { pictures, fetchMiddle } = this;
    const reading = `${file.axes} ${file.stored_shape}`;
    if (pictures.axes !== reading && fetchMiddle) {
      const choose = (/** @type {number} */ index) => this.change({ channel: String(index) });
      this.pictures = { axes: reading, root: channelPictures(file, chosen, fetchMiddle, choose) };
    }
    const { root } = this.pictures;
    for (const [index, made] of [...root.children].entries())
      made.setAttribute("aria-pressed", String(index === chosen));
    return root;
  }

  /** One time point, some of them, or all. @param {Description} file */
  #timeFields(file) {
    const time = this.parameters.time ?? "0";
    const several = isRange(time);
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
        onchange: () => this.change({ time: read() }),
      });
    const one = numeric("time", first || "0", "Time point");
    const from = numeric("time-from", first || "0", "First time point");
    const last = numeric("time-last", String(Number(stop || file.times) - 1), "Last time point");
    const kind = element(
      "select",
      {
        id: "times",
        "aria-label": "Time points",
        onchange: () => this.change(kind.value === "one" ? { time: read(), link: "" } : { time: read() }),
      },
      ...[
        ["one", "one"],
        ["some", "from … to"],
        ["all", `all ${file.times}`],
      ].map(([value, text]) =>
        element("option", { value, selected: value === (several ? (time === "all" ? "all" : "some") : "one") }, text),
      ),
    );
    const read = () => {
      if (kind.value === "all") return "all";
      if (kind.value === "one") return one.value || "0";
      const begin = Math.min(Number(from.value), file.times - 1);
      return `${begin}:${Math.max(begin, Math.min(Number(last.value), file.times - 1)) + 1}`;
    };
    const link = element("input", {
      type: "checkbox",
      id: "link",
      checked: this.parameters.link === "overlap",
      onchange: () => this.change({ link: link.checked ? "overlap" : "" }),
    });
    const numbers = several ? time !== "all" && element("div", { class: "row tight" }, from, "to", last) : one;
    return [
      field(
        "Time points",
        element("div", { class: "row tight" }, kind, numbers),
        element("span", { class: "muted small" }, `0 to ${file.times - 1}`),
      ),
      ...(several ? [element("label", { class: "slim" }, link, "Give objects one number through time")] : []),
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
        "aria-label": `Voxel size along ${axis} in micrometres`,
        onchange: () => {
          const [x, y, z] = inputs.map((input) => input.value);
          if (Number(x) > 0 && Number(y) > 0 && Number(z) > 0) this.change({ voxel_size: `${z},${y},${x}` });
        },
      }),
    );
    return element(
      "fieldset",
      { class: edges ? "field voxel-size" : "field voxel-size wanted" },
      element("legend", { class: "field-name" }, "Voxel size x, y, z in µm"),
      element("div", { class: "row tight" }, ...inputs),
    );
  }
}
