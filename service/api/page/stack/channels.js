/** Channels of a stack: their colors and names, and toggles that overlay channels in the views. */

import { element, formatMessage, redraw } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { chooseContrast } from "../viewer/scene.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Overlay} Overlay */
/** @typedef {import("../viewer/scene.js").Color} Color */
/** @typedef {(channel: number, signal: AbortSignal, onblock: (volume: Volume) => void) => Promise<Volume>} FetchChannel */

/** Colors of channels whose color the file does not specify. @type {Color[]} */
const DEFAULT_COLORS = [
  [0, 255, 0],
  [255, 0, 255],
  [0, 200, 255],
  [255, 200, 0],
  [255, 80, 80],
  [255, 255, 255],
];

/** If no component of a color from the file exceeds this value, the color is too dark to be seen and is not used. */
const MAX_DARK_COMPONENT = 60;

/** @param {Description} file @param {number} channel @returns {Color} */
export function getChannelColor(file, channel) {
  const match = /^#(\w\w)(\w\w)(\w\w)$/.exec(file.colours[channel] ?? "");
  const components = match?.slice(1).map((part) => Number.parseInt(part, 16));
  if (components && Math.max(...components) > MAX_DARK_COMPONENT) return /** @type {Color} */ (components);
  return DEFAULT_COLORS[channel % DEFAULT_COLORS.length];
}

/** @param {Description} file @param {number} channel */
export function getChannelName(file, channel) {
  return file.channels[channel] || `Channel ${channel + 1}`;
}

/** Create a dot in the color of a channel. @param {Description} file @param {number} channel */
export function createSwatch(file, channel) {
  const dot = element("span", { class: "dot" });
  dot.style.background = `rgb(${getChannelColor(file, channel).join(" ")})`;
  return dot;
}

/** Toggles in the toolbar that overlay other channels on the segmented channel. */
export class ChannelTools {
  /** @param {import("../viewer/viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.scene = viewer.scene;
    this.toggles = element("div", { class: "tools", role: "group", "aria-label": "Displayed channels" });
    this.adjustedChannelSelect = element("select", {
      "aria-label": "Channel whose contrast is adjusted",
      onchange: () => {
        const channel = Number(this.adjustedChannelSelect.value);
        this.scene.set({ adjustedChannel: channel === this.primaryChannel ? null : channel });
      },
    });
    this.root = element("div", { class: "tools", hidden: true }, this.toggles, this.adjustedChannelSelect);
    this.loadAbort = new AbortController();
    this.primaryChannel = 0;
    this.scene.subscribe((previousState) => {
      if (hasChanged(previousState, this.scene.state, ["overlays", "adjustedChannel"])) this.#updateControls();
    });
  }

  /**
   * Show the channels of a stack. The views already display the primary channel.
   * @param {Description} file @param {number} primaryChannel channel that is segmented
   * @param {FetchChannel} fetchChannel
   */
  show(file, primaryChannel, fetchChannel) {
    this.file = file;
    this.primaryChannel = primaryChannel;
    this.fetchChannel = fetchChannel;
    this.root.hidden = file.channels.length < 2;
    this.loadAbort.abort();
    this.loadAbort = new AbortController();
    const overlays = this.scene.state.overlays.filter(
      ({ channel }) => channel !== primaryChannel && channel < file.channels.length,
    );
    this.#setOverlays(overlays);
    for (const { channel } of overlays) this.#fetchOverlay(channel);
    this.#updateControls();
  }

  /** @param {number} channel */
  toggle(channel) {
    const { file } = this;
    if (!file) return;
    const { overlays } = this.scene.state;
    const remainingOverlays = overlays.filter((layer) => layer.channel !== channel);
    if (remainingOverlays.length < overlays.length) return this.#setOverlays(remainingOverlays);
    this.#setOverlays([
      ...overlays,
      { channel, image: null, color: getChannelColor(file, channel), contrast: [0, 1], range: [0, 1] },
    ]);
    return this.#fetchOverlay(channel);
  }

  /** @param {Overlay[]} overlays */
  #setOverlays(overlays) {
    const { scene, file, primaryChannel } = this;
    const adjustedChannel = overlays.some(({ channel }) => channel === scene.state.adjustedChannel)
      ? scene.state.adjustedChannel
      : null;
    scene.set({
      overlays,
      adjustedChannel,
      color: file && overlays.length ? getChannelColor(file, primaryChannel) : [255, 255, 255],
    });
  }

  /** @param {number} channel */
  async #fetchOverlay(channel) {
    const { scene } = this;
    const { signal } = this.loadAbort;
    /** @param {Partial<Overlay>} changes */
    const changeOverlay = (changes) => {
      const { overlays } = scene.state;
      scene.set({ overlays: overlays.map((layer) => (layer.channel === channel ? { ...layer, ...changes } : layer)) });
    };
    const overlay = scene.state.overlays.find((layer) => layer.channel === channel);
    const isNew = overlay?.image === null;
    try {
      let isFirstBlock = true;
      const image = await this.fetchChannel?.(channel, signal, (volume) => {
        changeOverlay(isFirstBlock && isNew ? { image: volume, ...chooseContrast(volume) } : { image: volume });
        isFirstBlock = false;
        this.viewer.draw();
      });
      if (image && isNew) changeOverlay(chooseContrast(image));
    } catch (error) {
      if (!signal.aborted) this.viewer.fetchStatus.replaceChildren(formatMessage(error));
    }
  }

  /** Update the controls from the scene. */
  #updateControls() {
    const { file, scene, primaryChannel } = this;
    if (!file) return;
    const { overlays, adjustedChannel } = scene.state;
    const visibleChannels = [primaryChannel, ...overlays.map(({ channel }) => channel)];
    redraw(this.toggles, () =>
      file.channels.map((_, channel) => {
        const isPrimary = channel === primaryChannel;
        const properties = {
          type: "button",
          class: "quiet toggle",
          "aria-pressed": String(visibleChannels.includes(channel)),
        };
        const onclick = () => this.toggle(channel);
        const title = isPrimary ? "The segmented channel" : "Show or hide this channel";
        const content = [createSwatch(file, channel), getChannelName(file, channel)];
        return element("button", { ...properties, title, disabled: isPrimary, onclick }, ...content);
      }),
    );
    redraw(this.adjustedChannelSelect, () =>
      visibleChannels.map((channel) =>
        element(
          "option",
          { value: String(channel), selected: channel === (adjustedChannel ?? primaryChannel) },
          getChannelName(file, channel),
        ),
      ),
    );
    this.adjustedChannelSelect.hidden = overlays.length === 0;
  }
}
