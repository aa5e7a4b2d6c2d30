/** What was understood of a stack, with a control for everything that a file leaves open, and the button that runs it. */

import { button, element, field, redraw } from "../core/elements.js";
import { request } from "../core/requests.js";
import { counted, duration, number, pageWords, SETTINGS, size } from "../core/words.js";
import { channelPictures, nameOf } from "./channels.js";
import { isRange } from "./time_points.js";

/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {import("../core/requests.js").Problem} Problem */
/** @typedef {Record<string, string>} Parameters by the names of the service; what is empty is not sent */

/** Likely meanings of the axes of a file, by their number. @type {Record<number, string[]>} */
const LIKELY_AXES = {
  2: ["YX"],
  3: ["ZYX", "TYX", "CYX"],
  4: ["CZYX", "ZCYX", "TZYX", "TCYX"],
  5: ["TZCYX", "TCZYX"],
  6: ["TZCYXS"],
};

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

export class StackView extends EventTarget {
  /**
   * @param {HTMLElement} root @param {Model[]} models @param {string | null} first the default model
   * @param {Set<string>} known names of the service's parameters
   */
  constructor(root, models, first, known) {
    super();
    this.known = known;
    /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
    this.optional = new Map();
    this.models = models.filter((model) => model.input);
    /** @type {Parameters} */
    this.parameters = { model: first ?? this.models[0]?.name ?? "" };
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
    this.open = element("div", { class: "open-questions" });
    this.controls.append(this.open, this.settings);
    /** @type {Inspection | null} */
    this.inspection = null;
    /** Fetches a small plane from the middle of a channel. @type {((channel: number) => Promise<import("../volumes/planes.js").Volume>) | null} */
    this.fetchMiddle = null;
    /** Pictures of the channels, made once for a reading of the axes. */
    this.pictures = { axes: "", root: element("div") };
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
    redraw(this.open, () => this.#ask(file));
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
    const suggested = problem.axes;
    const dimensions = suggested?.length ?? this.parameters.axes?.length ?? 0;
    const choices = problem.slug === "ambiguous-axes" || this.parameters.axes ? (LIKELY_AXES[dimensions] ?? []) : [];
    const all = suggested ? [suggested, ...choices.filter((axes) => axes !== suggested)] : choices;
    const askable = problem.slug === "ambiguous-axes" || all.length > 0;
    if (!this.inspection) this.settings.hidden = !askable;
    if (!askable) return;
    redraw(this.open, () => [
      element(
        "div",
        { class: "question", role: "group", "aria-label": "What the file leaves open" },
        element("p", {}, problem.message),
        element("div", { class: "row" }, ...all.map((axes) => button(axes, () => this.#change({ axes }), "secondary"))),
        problem.slug === "ambiguous-axes" &&
          field(
            "Other axes",
            element("input", {
              type: "text",
              maxLength: 6,
              placeholder: "one letter of T Z C Y X per dimension",
              onchange: (/** @type {Event} */ event) =>
                this.#change({ axes: /** @type {HTMLInputElement} */ (event.target).value.trim().toUpperCase() }),
            }),
          ),
      ),
    ]);
  }

  /** @param {import("openapi").Description} file @returns {import("../core/elements.js").Child[]} */
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

  /** @param {import("openapi").Description} file @param {string} stated */
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
            this.#change({
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

  /** @param {import("openapi").Description} file */
  #channelField(file) {
    const { channel } = this.parameters;
    const wanted = this.models.find((model) => model.name === this.parameters.model)?.input?.channels ?? 1;
    const nothing = wanted > 1 ? "as many as the model takes" : "choose one";
    const select = element(
      "select",
      { id: "channel", onchange: () => this.#change({ channel: select.value }) },
      (wanted > 1 || !channel) && element("option", { value: "", selected: !channel }, nothing),
      ...file.channels.map((name, index) => {
        const text = name ? `${index}: ${name}` : nameOf(file, index);
        return element("option", { value: String(index), selected: channel === String(index) }, text);
      }),
    );
    return field(SETTINGS.channel, select);
  }

  /** @param {import("openapi").Description} file */
  #channelPictures(file) {
    const { channel } = this.parameters;
    const chosen = channel === undefined || channel === "" ? -1 : Number(channel);
    const { pictures, fetchMiddle } = this;
    const reading = `${file.axes} ${file.stored_shape}`;
    if (pictures.axes !== reading && fetchMiddle) {
      const choose = (/** @type {number} */ index) => this.#change({ channel: String(index) });
      this.pictures = { axes: reading, root: channelPictures(file, chosen, fetchMiddle, choose) };
    }
    const { root } = this.pictures;
    for (const [index, made] of [...root.children].entries())
      made.setAttribute("aria-pressed", String(index === chosen));
    return root;
  }

  /** One time point, some of them, or all. @param {import("openapi").Description} file */
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
        onchange: () => this.#change({ time: read() }),
      });
    const one = numeric("time", first || "0", "Time point");
    const from = numeric("time-from", first || "0", "First time point");
    const last = numeric("time-last", String(Number(stop || file.times) - 1), "Last time point");
    const kind = element(
      "select",
      {
        id: "times",
        "aria-label": "Time points",
        onchange: () => this.#change(kind.value === "one" ? { time: read(), link: "" } : { time: read() }),
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
      onchange: () => this.#change({ link: link.checked ? "overlap" : "" }),
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

  /** @param {import("openapi").Description} file */
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
          if (Number(x) > 0 && Number(y) > 0 && Number(z) > 0) this.#change({ voxel_size: `${z},${y},${x}` });
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
