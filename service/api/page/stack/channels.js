/** Channels of a stack: pictures to choose one by, and an overlay of several in the views. */

import { element, redraw } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { fittingContrast } from "../viewer/scene.js";
import { cut, paintGrey, quantiles } from "../volumes/slices.js";

/** @typedef {import("openapi").Description} Description */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Overlay} Overlay */
/** @typedef {import("../viewer/scene.js").Colour} Colour */
/** @typedef {(channel: number, signal: AbortSignal, onblock: (volume: Volume) => void) => Promise<Volume>} Fetch */

/** Of channels whose file states none. @type {Colour[]} */
const COLOURS = [
  [0, 255, 0],
  [255, 0, 255],
  [0, 200, 255],
  [255, 200, 0],
  [255, 80, 80],
  [255, 255, 255],
];

/** @param {Description} file @param {number} channel @returns {Colour} */
export function colourOf(file, channel) {
  const stated = /^#(\w\w)(\w\w)(\w\w)$/.exec(file.colours[channel] ?? "");
  // What is black or nearly so would be seen as nothing.
  const parts = stated?.slice(1).map((part) => Number.parseInt(part, 16));
  if (parts && Math.max(...parts) > 60) return /** @type {Colour} */ (parts);
  return COLOURS[channel % COLOURS.length];
}

/** @param {Description} file @param {number} channel */
export function nameOf(file, channel) {
  return file.channels[channel] || `Channel ${channel}`;
}

/** @param {Description} file @param {number} channel */
function swatch(file, channel) {
  const made = element("span", { class: "dot" });
  made.style.background = `rgb(${colourOf(file, channel).join(" ")})`;
  return made;
}

/**
 * Buttons with the picture, colour and name of each channel.
 * @param {Description} file @param {number} chosen -1: none
 * @param {(channel: number) => Promise<Volume>} fetchMiddle fetches a small plane from the middle of the stack
 * @param {(channel: number) => void} onchoose
 */
export function channelPictures(file, chosen, fetchMiddle, onchoose) {
  const buttons = file.channels.map((_, channel) => {
    const canvas = element("canvas", { width: 72, height: 54, "aria-hidden": "true" });
    fetchMiddle(channel).then(
      (volume) => drawSmall(canvas, volume, colourOf(file, channel)),
      () => canvas.remove(),
    );
    const properties = { type: "button", class: "channel", "aria-pressed": String(channel === chosen) };
    const onclick = () => onchoose(channel);
    const words = element("span", {}, swatch(file, channel), nameOf(file, channel));
    return element("button", { ...properties, onclick }, canvas, words);
  });
  return element("div", { class: "channels", role: "group", "aria-label": "Channels by their pictures" }, ...buttons);
}

/** @param {HTMLCanvasElement} canvas @param {Volume} volume of one plane @param {Colour} colour */
function drawSmall(canvas, volume, colour) {
  const [low, high] = quantiles(volume.data, [0.01, 0.995]);
  const plane = cut(volume, 0, 0);
  const whole = element("canvas", { width: plane.width, height: plane.height });
  whole.getContext("2d")?.putImageData(paintGrey(plane, low, Math.max(high, low + 1e-9), colour), 0, 0);
  const scale = Math.max(canvas.width / plane.width, canvas.height / plane.height);
  const [width, height] = [plane.width * scale, plane.height * scale];
  canvas.getContext("2d")?.drawImage(whole, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}

/** Toggles for the channels in the toolbar of the views: those that are on are added to the one that is segmented. */
export class ChannelTools {
  /** @param {import("../viewer/viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.scene = viewer.scene;
    this.toggles = element("div", { class: "tools", role: "group", "aria-label": "Channels that are shown" });
    this.target = element("select", {
      "aria-label": "Channel whose contrast is set",
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
   * Show the channels of a stack, of which the views have one already.
   * @param {Description} file @param {number} primary the channel that the views have
   * @param {Fetch} fetchChannel
   */
  show(file, primary, fetchChannel) {
    this.file = file;
    this.primary = primary;
    this.fetchChannel = fetchChannel;
    this.root.hidden = file.channels.length < 2;
    this.loading.abort();
    this.loading = new AbortController();
    const shown = this.scene.state.overlays.filter(
      ({ channel }) => channel !== primary && channel < file.channels.length,
    );
    this.#setOverlays(shown);
    for (const { channel } of shown) this.#fetch(channel);
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
      { channel, image: null, colour: colourOf(file, channel), contrast: [0, 1], range: [0, 1] },
    ]);
    return this.#fetch(channel);
  }

  /** @param {Overlay[]} overlays */
  #setOverlays(overlays) {
    const { scene, file, primary } = this;
    const adjusted = overlays.some(({ channel }) => channel === scene.state.adjusted) ? scene.state.adjusted : null;
    scene.set({ overlays, adjusted, colour: file && overlays.length ? colourOf(file, primary) : [255, 255, 255] });
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
    const known = scene.state.overlays.find((layer) => layer.channel === channel);
    const fresh = known?.image === null;
    try {
      let first = true;
      const image = await this.fetchChannel?.(channel, signal, (volume) => {
        change(first && fresh ? { image: volume, ...fittingContrast(volume) } : { image: volume });
        first = false;
        this.viewer.draw();
      });
      if (image && fresh) change(fittingContrast(image));
    } catch (error) {
      if (!signal.aborted) this.viewer.waiting.textContent = /** @type {Error} */ (error).message;
    }
  }

  /** Draw the controls as the scene is. */
  #update() {
    const { file, scene, primary } = this;
    if (!file) return;
    const { overlays, adjusted } = scene.state;
    const all = [primary, ...overlays.map(({ channel }) => channel)];
    redraw(this.toggles, () =>
      file.channels.map((_, channel) => {
        const own = channel === primary;
        const properties = { type: "button", class: "quiet toggle", "aria-pressed": String(all.includes(channel)) };
        const onclick = () => this.toggle(channel);
        const title = own ? "The channel that is segmented" : "Show this channel too";
        const words = [swatch(file, channel), nameOf(file, channel)];
        return element("button", { ...properties, title, disabled: own, onclick }, ...words);
      }),
    );
    redraw(this.target, () =>
      all.map((channel) =>
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
