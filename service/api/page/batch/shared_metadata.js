/** Controls for metadata that several files of a batch lack: channel, time points and voxel size. */

import { element, field, redraw } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { SETTING_TITLES } from "../core/terminology.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */

/** Controls that change the shared metadata of a batch. Each control is shown only if a file needs it. */
export class SharedMetadataControls {
  /** @param {HTMLElement} root @param {Batch} batch @param {import("openapi").ModelInfo[]} models */
  constructor(root, batch, models) {
    this.root = root;
    this.batch = batch;
    this.models = models;
    this.shown = "";
  }

  update() {
    const entries = this.batch.stacks.filter(({ facts }) => facts !== null);
    const channelNames = listChannelNames(entries);
    const seriesCount = entries.filter(({ facts }) => facts !== null && facts.times > 1).length;
    const unscaledCount = entries.filter(({ facts }) => facts?.lacksVoxelSize).length;
    const model = this.models.find(({ name }) => name === this.batch.parameters.model);
    const isMultiChannel = (model?.input?.channels ?? 1) > 1;
    const key = JSON.stringify([channelNames, seriesCount, unscaledCount, isMultiChannel, this.batch.shared]);
    if (key === this.shown) return;
    this.shown = key;
    redraw(this.root, () => [
      channelNames.length > 1 && this.#createChannelField(channelNames, isMultiChannel),
      seriesCount > 0 && this.#createTimeField(seriesCount),
      unscaledCount > 0 && this.#createVoxelSizeField(unscaledCount, entries.length),
    ]);
  }

  /** @param {string[]} names "" for a channel whose name is unknown or differs between the files @param {boolean} isMultiChannel whether the model uses several channels */
  #createChannelField(names, isMultiChannel) {
    const { channel } = this.batch.shared;
    const select = element(
      "select",
      { "aria-label": SETTING_TITLES.channel, onchange: () => this.batch.setShared({ channel: select.value }) },
      element("option", { value: "" }, isMultiChannel ? "all channels" : "select one"),
      ...names.map((name, index) =>
        element(
          "option",
          { value: String(index), selected: channel === String(index) },
          name ? `${index + 1}: ${name}` : `channel ${index + 1}`,
        ),
      ),
    );
    const root = field(SETTING_TITLES.channel, select, createHint("For the stacks with several channels"));
    root.classList.toggle("required", !isMultiChannel && channel === "");
    return root;
  }

  /** @param {number} seriesCount */
  #createTimeField(seriesCount) {
    const { time, link } = this.batch.shared;
    const options = [
      ["", "select"],
      ["0", "only the first"],
      ["all", "all"],
    ];
    const select = element(
      "select",
      { "aria-label": "Time points", onchange: () => this.batch.setShared({ time: select.value }) },
      ...options.map(([value, text]) => element("option", { value, selected: value === time }, text)),
    );
    const checkbox = element("input", {
      type: "checkbox",
      checked: link !== "",
      onchange: () => this.batch.setShared({ link: checkbox.checked ? "overlap" : "" }),
    });
    const root = element(
      "div",
      { class: "field" },
      field("Time points", select, createHint(`For ${formatCount(seriesCount, "time series", "time series")}`)),
      time === "all" && element("label", { class: "inline-label" }, checkbox, "Track objects over time"),
    );
    root.classList.toggle("required", time === "");
    return root;
  }

  /** @param {number} unscaledCount number of stacks without a voxel size @param {number} count number of inspected stacks */
  #createVoxelSizeField(unscaledCount, count) {
    const lengths = this.batch.shared.voxel_size.split(",").reverse();
    const inputs = ["x", "y", "z"].map((axis, index) =>
      element("input", {
        type: "number",
        min: "0",
        step: "any",
        value: lengths[index] ?? "",
        placeholder: axis,
        "aria-label": `Voxel size along ${axis} in micrometers`,
        onchange: () => {
          const [x, y, z] = inputs.map((input) => input.value);
          const isComplete = [x, y, z].every((length) => Number(length) > 0);
          const isEmpty = [x, y, z].every((length) => length === "");
          if (isComplete || isEmpty) this.batch.setShared({ voxel_size: isComplete ? `${z},${y},${x}` : "" });
        },
      }),
    );
    return element(
      "fieldset",
      { class: this.batch.shared.voxel_size ? "field voxel-size" : "field voxel-size required" },
      element("legend", { class: "field-name" }, "Voxel size x, y, z in µm"),
      element("div", { class: "row tight" }, ...inputs),
      createHint(
        unscaledCount === count
          ? "The files have no voxel size"
          : `For the ${formatCount(unscaledCount, "stack")} without a voxel size in the file`,
      ),
    );
  }
}

/** @param {string} text */
function createHint(text) {
  return element("span", { class: "muted small" }, text);
}

/** Return the names of the channels of the stacks with the most channels. @param {Entry[]} entries @returns {string[]} "" if the names differ between the files */
function listChannelNames(entries) {
  const lists = entries.map(({ inspection }) => inspection?.file.channels ?? []).filter((names) => names.length > 1);
  const count = lists.reduce((max, names) => Math.max(max, names.length), 0);
  return Array.from({ length: count }, (_, index) => {
    const names = new Set(lists.filter((list) => list.length > index).map((list) => list[index]));
    return names.size === 1 ? [...names][0] : "";
  });
}
