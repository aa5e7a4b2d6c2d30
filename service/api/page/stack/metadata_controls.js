/** Controls for metadata that is missing from a file or that the user can override: scene, axes, channel, time points, voxel size. */

import { button, element, field, formatMessage, redraw } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { SETTING_TITLES } from "../core/terminology.js";
import { findScene } from "../volumes/planes.js";
import { formatTimePoint, isTimeSeries } from "../volumes/time_points.js";
import { createSwatch, getChannelColor, getChannelName } from "./channels.js";
import { createPreviews } from "./previews.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("./settings_view.js").Parameters} Parameters */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {{fetchChannel: (channel: number) => Promise<Volume>, fetchScene: (scene: number) => Promise<Volume>}} PreviewFetchers functions that fetch a small plane from the middle of a channel or scene */

/** Likely axes of a file, by number of dimensions. @type {Record<number, string[]>} */
const LIKELY_AXES = {
  2: ["YX"],
  3: ["ZYX", "TYX", "CYX"],
  4: ["CZYX", "ZCYX", "TZYX", "TCYX"],
  5: ["TZCYX", "TCZYX"],
  6: ["TZCYXS"],
};

/** Meaning of the axis letters. */
export const AXIS_LEGEND = "T: time, Z: depth, C: channel, Y: row, X: column, S: color sample";

/** Singular and plural of what an axis counts. @type {Record<string, [string, string]>} */
const AXIS_NOUNS = {
  T: ["time point", "time points"],
  Z: ["plane", "planes"],
  C: ["channel", "channels"],
  S: ["color", "colors"],
  Y: ["row", "rows"],
  X: ["column", "columns"],
};
/** The sizes of the stored dimensions in a message of the service. */
const STORED_SHAPE_PATTERN = /(?:dimensions are|stored shape is) (\d+(?: x \d+)+)/;

/** Maximum number of scenes with previews. */
const MAX_SCENE_PREVIEWS = 24;
/** Color of previews that show gray values. @type {import("../viewer/scene.js").Color} */
const WHITE = [255, 255, 255];

/** The controls for the scene, the axes, the channel, the time points and the voxel size. */
export class MetadataControls {
  /** @param {import("openapi").ModelInfo[]} models @param {(changes: Parameters) => void} changeParameters called with the parameters that the user changed */
  constructor(models, changeParameters) {
    this.models = models;
    this.changeParameters = changeParameters;
    this.root = element("div", { class: "metadata-controls" });
    /** @type {Parameters} */
    this.parameters = {};
    /** Names of the scenes, empty if the file has only one scene. @type {string[]} */
    this.scenes = [];
    this.isSceneRequired = false;
    /** @type {PreviewFetchers | null} */
    this.fetchers = null;
    /** Groups of previews by label, each with a key for the part of the file that the previews show. @type {Map<string, {key: string, root: HTMLElement}>} */
    this.previews = new Map();
  }

  /** Show the controls. @param {Description} file metadata as the service interprets it @param {Parameters} parameters current settings @param {boolean} isSceneRequired whether the user has to select a scene */
  show(file, parameters, isSceneRequired) {
    this.parameters = parameters;
    this.scenes = file.scenes;
    this.isSceneRequired = isSceneRequired;
    redraw(this.root, () => this.#createControls(file));
  }

  /**
   * Ask the user for the axes of a stack that cannot be read without them.
   * @param {import("../batch/entries.js").EntryProblem} problem @param {Parameters} parameters
   * @returns {boolean} false if the problem is not caused by the axes
   */
  askForAxes(problem, parameters) {
    /** @type {string | undefined} */
    const suggestedAxes = problem.suggestedValues.axes;
    const dimensionCount = suggestedAxes?.length ?? parameters.axes?.length ?? 0;
    const choices = problem.slug === "ambiguous-axes" || parameters.axes ? (LIKELY_AXES[dimensionCount] ?? []) : [];
    const options = suggestedAxes ? [suggestedAxes, ...choices.filter((axes) => axes !== suggestedAxes)] : choices;
    const isAxesProblem = problem.slug === "ambiguous-axes" || options.length > 0;
    if (!isAxesProblem) return false;
    const shape = (STORED_SHAPE_PATTERN.exec(problem.detail)?.[1].split(" x ") ?? []).map(Number);
    redraw(this.root, () => [
      ...this.#createSceneControls(),
      element(
        "div",
        { class: "question", role: "group", "aria-label": "Axes of the file" },
        element(
          "p",
          {},
          formatMessage(shape.length > 0 ? describeUnnamedAxes(shape, problem.message) : problem.message),
        ),
        element(
          "ul",
          { class: "axes-options" },
          ...options.map((axes) =>
            element(
              "li",
              {},
              button(axes, () => this.changeParameters({ axes }), "secondary"),
              element("span", { class: "small" }, describeAxes(axes, shape)),
            ),
          ),
        ),
        element("p", { class: "muted small" }, AXIS_LEGEND),
        problem.slug === "ambiguous-axes" &&
          field(
            "Other axes",
            element("input", {
              type: "text",
              maxLength: 6,
              placeholder: "one letter per dimension",
              onchange: (/** @type {Event} */ event) =>
                this.changeParameters({
                  axes: /** @type {HTMLInputElement} */ (event.target).value.trim().toUpperCase(),
                }),
            }),
          ),
      ),
    ]);
    return true;
  }

  /**
   * Ask the user whether to use the planes that are present, if the file lacks some.
   * @param {import("../batch/entries.js").EntryProblem} problem
   * @returns {boolean} false if the problem is not caused by missing planes
   */
  askForIncompleteStack(problem) {
    const allow_incomplete = problem.suggestedValues.allow_incomplete;
    if (!allow_incomplete) return false;
    redraw(this.root, () => [
      ...this.#createSceneControls(),
      element(
        "div",
        { class: "question", role: "group", "aria-label": "Missing planes" },
        element("p", {}, formatMessage(problem.message)),
        button("Use the planes that are present", () => this.changeParameters({ allow_incomplete }), "secondary"),
      ),
    ]);
    return true;
  }

  /** @param {Description} file @returns {import("../core/elements.js").Child[]} */
  #createControls(file) {
    const controls = this.#createSceneControls();
    if (file.channels.length > 1) controls.push(this.#createChannelField(file), this.#updateChannelPreviews(file));
    if (file.times > 1) controls.push(...this.#createTimeFields(file));
    controls.push(this.#createVoxelSizeField(file));
    const selectedAxes = this.parameters.axes ?? "";
    // Offer a choice if the service had to assume the axes: pages read as planes may be time points or channels.
    if (selectedAxes || file.times > 1 || file.notes.some((note) => note.includes("axes=")))
      controls.push(this.#createAxesField(file, selectedAxes));
    return controls;
  }

  /** @param {Description} file @param {string} selectedAxes axes that the user selected, "" for the axes in the file */
  #createAxesField(file, selectedAxes) {
    const likelyAxes = (LIKELY_AXES[file.axes.length] ?? []).filter(
      (axes) => axes !== selectedAxes && (selectedAxes || axes !== file.axes),
    );
    const options = selectedAxes ? [selectedAxes, ...likelyAxes] : likelyAxes;
    return field(
      SETTING_TITLES.axes,
      element(
        "select",
        {
          id: "axes",
          // The selected channel and time points may not exist with the new axes.
          onchange: (/** @type {Event} */ event) =>
            this.changeParameters({
              axes: /** @type {HTMLSelectElement} */ (event.target).value,
              channel: "",
              time: "",
              link: "",
            }),
        },
        element("option", { value: "" }, selectedAxes ? "automatic" : `${file.axes}, automatic`),
        ...options.map((axes) => {
          const text = [axes, describeAxes(axes, file.stored_shape)].filter(Boolean).join(": ");
          return element("option", { value: axes, selected: axes === selectedAxes }, text);
        }),
      ),
      element("span", { class: "muted small" }, AXIS_LEGEND),
    );
  }

  /** Create the controls for the scene, none if the file has only one scene. @returns {import("../core/elements.js").Child[]} */
  #createSceneControls() {
    const { scenes } = this;
    if (scenes.length === 0) return [];
    const selectedScene = findScene(scenes, this.parameters.scene);
    const select = element(
      "select",
      { id: "scene", onchange: () => this.#selectScene(select.value) },
      selectedScene < 0 &&
        element("option", { value: "", selected: true }, this.isSceneRequired ? "select one" : "default"),
      ...scenes.map((name, index) => {
        const text = name ? `${index + 1}: ${name}` : `Scene ${index + 1}`;
        return element("option", { value: String(index), selected: index === selectedScene }, text);
      }),
    );
    const previewsText = scenes.length > MAX_SCENE_PREVIEWS ? ` The first ${MAX_SCENE_PREVIEWS} have previews.` : "";
    const hint = `The file has ${scenes.length} images, such as fields of view.${previewsText}`;
    const root = field(SETTING_TITLES.scene, select, element("span", { class: "muted small" }, hint));
    root.classList.toggle("required", this.isSceneRequired && selectedScene < 0);
    return [root, this.#updateScenePreviews()];
  }

  /** Select a scene. The selected axes, channel and time points may not exist in this scene. @param {string} scene index */
  #selectScene(scene) {
    if (scene === String(findScene(this.scenes, this.parameters.scene))) return;
    this.changeParameters({ scene, axes: "", channel: "", time: "", link: "" });
    // The controls remain unchanged if the scene cannot be read, so show immediately which scene is selected.
    const select = this.root.querySelector("#scene");
    if (select instanceof HTMLSelectElement) select.value = scene;
    this.#updateScenePreviews();
  }

  /** @param {Description} file */
  #createChannelField(file) {
    const { channel } = this.parameters;
    const inputChannels = this.models.find((model) => model.name === this.parameters.model)?.input?.channels ?? 1;
    const placeholder = inputChannels > 1 ? "all channels" : "select one";
    const select = element(
      "select",
      { id: "channel", onchange: () => this.changeParameters({ channel: select.value }) },
      (inputChannels > 1 || !channel) && element("option", { value: "", selected: !channel }, placeholder),
      ...file.channels.map((name, index) => {
        const text = name ? `${index + 1}: ${name}` : getChannelName(file, index);
        return element("option", { value: String(index), selected: channel === String(index) }, text);
      }),
    );
    return field(SETTING_TITLES.channel, select);
  }

  #updateScenePreviews() {
    const { scenes } = this;
    const key = JSON.stringify([scenes, this.parameters.allow_incomplete]);
    const createScenePreviews = (/** @type {PreviewFetchers} */ { fetchScene }) =>
      scenes.slice(0, MAX_SCENE_PREVIEWS).map((name, index) => ({
        caption: [name || `Scene ${index + 1}`],
        color: WHITE,
        fetchPlane: () => fetchScene(index),
      }));
    return this.#updatePreviews(
      "Scene previews",
      key,
      findScene(scenes, this.parameters.scene),
      createScenePreviews,
      (index) => this.#selectScene(String(index)),
    );
  }

  /** @param {Description} file */
  #updateChannelPreviews(file) {
    const { channel, scene } = this.parameters;
    const selectedChannel = channel === undefined || channel === "" ? -1 : Number(channel);
    const createChannelPreviews = (/** @type {PreviewFetchers} */ { fetchChannel }) =>
      file.channels.map((_, index) => ({
        caption: [createSwatch(file, index), getChannelName(file, index)],
        color: getChannelColor(file, index),
        fetchPlane: () => fetchChannel(index),
      }));
    return this.#updatePreviews(
      "Channel previews",
      JSON.stringify([scene, file.axes, file.stored_shape]),
      selectedChannel,
      createChannelPreviews,
      (index) => this.changeParameters({ channel: String(index) }),
    );
  }

  /**
   * Return a group of previews. The group is created again only if its key has changed.
   * @param {string} label @param {string} key @param {number} selectedIndex index of the selected preview, -1 for none
   * @param {(fetchers: PreviewFetchers) => import("./previews.js").Preview[]} create @param {(index: number) => void} onselect
   */
  #updatePreviews(label, key, selectedIndex, create, onselect) {
    const { previews, fetchers } = this;
    if (previews.get(label)?.key !== key && fetchers)
      previews.set(label, { key, root: createPreviews(label, create(fetchers), onselect) });
    const root = previews.get(label)?.root ?? element("div");
    for (const [index, preview] of [...root.children].entries())
      preview.setAttribute("aria-pressed", String(index === selectedIndex));
    return root;
  }

  /** Create the controls for one, several or all time points. @param {Description} file */
  #createTimeFields(file) {
    const time = this.parameters.time ?? "0";
    const isSeries = isTimeSeries(time);
    const [start, stop] = time === "all" ? ["", ""] : time.split(":");
    /** @param {string} id @param {number} value index of a time point @param {string} label */
    const createNumberInput = (id, value, label) =>
      element("input", {
        type: "number",
        id,
        min: "1",
        max: String(file.times),
        value: formatTimePoint(value),
        "aria-label": label,
        onchange: () => this.changeParameters({ time: readTime() }),
      });
    const timeInput = createNumberInput("time", Number(start), "Time point");
    const firstInput = createNumberInput("time-from", Number(start), "First time point");
    const lastInput = createNumberInput("time-last", Number(stop || file.times) - 1, "Last time point");
    const modeSelect = element(
      "select",
      {
        id: "times",
        "aria-label": "Time points",
        onchange: () =>
          this.changeParameters(modeSelect.value === "one" ? { time: readTime(), link: "" } : { time: readTime() }),
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
      if (modeSelect.value === "all") return "all";
      const [one, first, last] = [timeInput, firstInput, lastInput].map((input) =>
        Math.max(1, Math.min(Math.round(Number(input.value)), file.times)),
      );
      if (modeSelect.value === "one") return String(one - 1);
      return `${first - 1}:${Math.max(first, last)}`;
    };
    const linkCheckbox = element("input", {
      type: "checkbox",
      id: "link",
      checked: this.parameters.link === "overlap",
      onchange: () => this.changeParameters({ link: linkCheckbox.checked ? "overlap" : "" }),
    });
    const inputs = isSeries
      ? time !== "all" && element("div", { class: "row tight" }, firstInput, "to", lastInput)
      : timeInput;
    return [
      field(
        "Time points",
        element("div", { class: "row tight" }, modeSelect, inputs),
        element("span", { class: "muted small" }, `1 to ${file.times}`),
      ),
      ...(isSeries ? [element("label", { class: "inline-label" }, linkCheckbox, "Track objects over time")] : []),
    ];
  }

  /** @param {Description} file */
  #createVoxelSizeField(file) {
    const voxelSize = file.voxel_size;
    const knownSizes = { ...parsePartialSize(file.partial_voxel_size), ...voxelSize };
    const inputs = /** @type {const} */ (["x", "y", "z"]).map((axis) =>
      element("input", {
        type: "number",
        min: "0",
        step: "any",
        value: knownSizes[axis] ? String(Number(knownSizes[axis].toPrecision(5))) : "",
        placeholder: axis,
        "aria-label": `Voxel size along ${axis} in micrometers`,
        onchange: () => {
          const [x, y, z] = inputs.map((input) => input.value);
          if (Number(x) > 0 && Number(y) > 0 && Number(z) > 0) this.changeParameters({ voxel_size: `${z},${y},${x}` });
        },
      }),
    );
    return element(
      "fieldset",
      { class: voxelSize ? "field voxel-size" : "field voxel-size required" },
      element("legend", { class: "field-name" }, "Voxel size x, y, z in µm"),
      element("div", { class: "row tight" }, ...inputs),
    );
  }
}

/** Describe what axes mean for a stored array, such as "3 channels, 12 planes, 64 rows, 80 columns". @param {string} axes @param {number[]} shape @returns {string} "" if the numbers of axes and dimensions differ */
function describeAxes(axes, shape) {
  if (axes.length !== shape.length) return "";
  return [...axes].map((axis, index) => formatCount(shape[index], ...AXIS_NOUNS[axis])).join(", ");
}

/** @param {number[]} shape of an array whose axes are unknown @param {string} message of the service, which may give a reason */
function describeUnnamedAxes(shape, message) {
  const sizes = shape.map((size) => formatNumber(size));
  const reason = /^The axes of the file are unknown: .*?\. (?=The stored shape)/.exec(message)?.[0] ?? "";
  return `${reason}The file does not say what its ${sizes.length} dimensions mean. Their sizes are ${sizes.join(" × ")}, in the order in which they are stored. What are they?`;
}

/** @param {Description["partial_voxel_size"]} size along z, y and x @returns {Partial<import("openapi").VoxelSize>} the known sizes */
function parsePartialSize(size) {
  const [z, y, x] = size ?? [];
  return { z: z ?? undefined, y: y ?? undefined, x: x ?? undefined };
}
