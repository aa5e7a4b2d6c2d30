/** Channels of a stack: previews to select one, and an overlay of several channels in the views. */

import { element, redraw } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { fitContrast } from "../viewer/scene.js";
import { paintGray, quantiles, slice } from "../volumes/slices.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Overlay} Overlay */
/** @typedef {import("../viewer/scene.js").Color} Color */
/** @typedef {(channel: number, signal: AbortSignal, onblock: (volume: Volume) => void) => Promise<Volume>} FetchChannel */

/** Colors of channels for which the file has no color. @type {Color[]} */
const DEFAULT_COLORS = [
  [0, 255, 0],
  [255, 0, 255],
  [0, 200, 255],
  [255, 200, 0],
  [255, 80, 80],
  [255, 255, 255],
];

/** Brightness of the strongest component up to which a color of the file is too dark to be seen. */
const MAX_DARK_LEVEL = 60;

/** @param {Description} file @param {number} channel @returns {Color} */
export function colorOf(file, channel) {
  const match = /^#(\w\w)(\w\w)(\w\w)$/.exec(file.colours[channel] ?? "");
  const parts = match?.slice(1).map((part) => Number.parseInt(part, 16));
  if (parts && Math.max(...parts) > MAX_DARK_LEVEL) return /** @type {Color} */ (parts);
  return DEFAULT_COLORS[channel % DEFAULT_COLORS.length];
}

/** @param {Description} file @param {number} channel */
export function nameOf(file, channel) {
  return file.channels[channel] || `Channel ${channel}`;
}

/** @param {Description} file @param {number} channel */
function swatch(file, channel) {
  const dot = element("span", { class: "dot" });
  dot.style.background = `rgb(${colorOf(file, channel).join(" ")})`;
  return dot;
}

/**
 * Create a button with the preview, color and name of each channel.
 * @param {Description} file @param {number} selected -1: none
 * @param {(channel: number) => Promise<Volume>} fetchMiddle fetches a small plane from the middle of the stack
 * @param {(channel: number) => void} onselect
 */
export function channelPreviews(file, selected, fetchMiddle, onselect) {
  const buttons = file.channels.map((_, channel) => {
    const canvas = element("canvas", { width: 72, height: 54, "aria-hidden": "true" });
    fetchMiddle(channel).then(
      (volume) => drawPreview(canvas, volume, colorOf(file, channel)),
      () => canvas.remove(),
    );
    const properties = { type: "button", class: "channel", "aria-pressed": String(channel === selected) };
    const onclick = () => onselect(channel);
    const name = element("span", {}, swatch(file, channel), nameOf(file, channel));
    return element("button", { ...properties, onclick }, canvas, name);
  });
  return element("div", { class: "channels", role: "group", "aria-label": "Channel previews" }, ...buttons);
}

/** @param {HTMLCanvasElement} canvas @param {Volume} volume of one plane @param {Color} color */
function drawPreview(canvas, volume, color) {
  const [low, high] = quantiles(volume.data, [0.01, 0.995]);
  const plane = slice(volume, 0, 0);
  const image = element("canvas", { width: plane.width, height: plane.height });
  image.getContext("2d")?.putImageData(paintGray(plane, low, Math.max(high, low + 1e-9), color), 0, 0);
  const scale = Math.max(canvas.width / plane.width, canvas.height / plane.height);
  const [width, height] = [plane.width * scale, plane.height * scale];
  canvas.getContext("2d")?.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}

/** Toggles in the toolbar that overlay further channels on the segmented channel. */
export class ChannelTools {
  /** @param {import("../viewer/viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.scene = viewer.scene;
    this.toggles = element("div", { class: "tools", role: "group", "aria-label": "Displayed channels" });
    this.target = element("select", {
      "aria-label": "Channel whose contrast is adjusted",
      onchange: () => {
        const channel = Number(this.target.value);
        this.scene.set({ adjusted: channel === this.primary ? null : channel });
      },
    });
    this.root = element("div", { class: "tools", hidden: true }, this.toggles, this.target);
    this.loading = new AbortController();
    this.primary = 0;
    this.scene.subscribe((before) => {
      if (hasChanged(before, this.scene.state, ["overlays", "adjusted"])) this.#update();
    });
  }

  /**
   * Show the channels of a stack. The views already display the primary channel.
   * @param {Description} file @param {number} primary channel that is segmented
   * @param {FetchChannel} fetchChannel
   */
  show(file, primary, fetchChannel) {
    this.file = file;
    this.primary = primary;
    this.fetchChannel = fetchChannel;
    this.root.hidden = file.channels.length < 2;
    this.loading.abort();
    this.loading = new AbortController();
    const overlays = this.scene.state.overlays.filter(
      ({ channel }) => channel !== primary && channel < file.channels.length,
    );
    this.#setOverlays(overlays);
    for (const { channel } of overlays) this.#fetch(channel);
    this.#update();
  }

  /** @param {number} channel */
  toggle(channel) {
    const { file } = this;
    if (!file) return;
    const { overlays } = this.scene.state;
    const others = overlays.filter((layer) => layer.channel !== channel);
    if (others.length < overlays.length) return this.#setOverlays(others);
    this.#setOverlays([
      ...overlays,
      { channel, image: null, color: colorOf(file, channel), contrast: [0, 1], range: [0, 1] },
    ]);
    return this.#fetch(channel);
  }

  /** @param {Overlay[]} overlays */
  #setOverlays(overlays) {
    const { scene, file, primary } = this;
    const adjusted = overlays.some(({ channel }) => channel === scene.state.adjusted) ? scene.state.adjusted : null;
    scene.set({ overlays, adjusted, color: file && overlays.length ? colorOf(file, primary) : [255, 255, 255] });
  }

  /** @param {number} channel */
  async #fetch(channel) {
    const { scene } = this;
    const { signal } = this.loading;
    /** @param {Partial<Overlay>} changes */
    const change = (changes) => {
      const { overlays } = scene.state;
      scene.set({ overlays: overlays.map((layer) => (layer.channel === channel ? { ...layer, ...changes } : layer)) });
    };
    const overlay = scene.state.overlays.find((layer) => layer.channel === channel);
    const isNew = overlay?.image === null;
    try {
      let isFirstBlock = true;
      const image = await this.fetchChannel?.(channel, signal, (volume) => {
        change(isFirstBlock && isNew ? { image: volume, ...fitContrast(volume) } : { image: volume });
        isFirstBlock = false;
        this.viewer.draw();
      });
      if (image && isNew) change(fitContrast(image));
    } catch (error) {
      if (!signal.aborted) this.viewer.fetchStatus.textContent = /** @type {Error} */ (error).message;
    }
  }

  /** Update the controls from the scene. */
  #update() {
    const { file, scene, primary } = this;
    if (!file) return;
    const { overlays, adjusted } = scene.state;
    const visible = [primary, ...overlays.map(({ channel }) => channel)];
    redraw(this.toggles, () =>
      file.channels.map((_, channel) => {
        const isPrimary = channel === primary;
        const properties = { type: "button", class: "quiet toggle", "aria-pressed": String(visible.includes(channel)) };
        const onclick = () => this.toggle(channel);
        const title = isPrimary ? "The segmented channel" : "Show or hide this channel";
        const content = [swatch(file, channel), nameOf(file, channel)];
        return element("button", { ...properties, title, disabled: isPrimary, onclick }, ...content);
      }),
    );
    redraw(this.target, () =>
      visible.map((channel) =>
        element(
          "option",
          { value: String(channel), selected: channel === (adjusted ?? primary) },
          nameOf(file, channel),
        ),
      ),
    );
    this.target.hidden = overlays.length === 0;
  }
}
