/** The mode in which the labels of a result are corrected: its tools, its history, and where the corrected labels go. */

import { save } from "../core/elements.js";
import { counted } from "../core/format.js";
import * as kept from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { asNpy, asTiff, gzip } from "../volumes/label_files.js";
import { asCsv, measure } from "../volumes/label_measure.js";
import { firstTime } from "../volumes/time_points.js";
import { AnnotatedStacks } from "./annotated_stacks.js";
import { CorrectPanel } from "./correct_panel.js";
import { EditTools } from "./edit_tools.js";
import { edgesOfWhole, fetchImage, fetchLabels, isFine, refusalOf, showImage } from "./full_resolution.js";
import { actionOfKey } from "./tool_list.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const NO_LABELS = "There are no labels to correct here.";
const SOLID_MILLISECONDS = 400;

const ELSEWHERE =
  "This result is being corrected in another tab or window of this browser, and its corrections are kept. Go on here, and the other one stops.";
const TAKEN = "The corrections of this result go on in another tab or window of this browser. None of them is lost.";

/**
 * What is shown instead of the result once it is corrected.
 * @typedef {{editor: LabelEditor, image: Volume, before: {image: Volume, labels: Volume, overlays: import("../viewer/scene.js").Overlay[]}}} Mode
 */

/** Events of `root`: `kept` with the number of corrections and objects, `corrected` with the table of the labels that are shown. */
export class CorrectView {
  /**
   * @param {{job: import("openapi").JobReport, stack: string, name: string}} result stack: id, "" where it is not kept; name of the file
   * @param {Viewer} viewer @param {number} time point that is shown, of a series
   * @param {import("openapi").Abilities} abilities of the service @param {AbortSignal} signal ends the view
   */
  constructor({ job, stack, name }, viewer, time, abilities, signal) {
    this.job = job;
    this.stem = (name || "stack").replace(/(\.ome)?\.tiff?$/i, "");
    this.viewer = viewer;
    /** The time point whose labels are corrected, of a series. */
    this.at = time;
    this.signal = signal;
    /** @type {Mode | null} */
    this.mode = null;
    /** Ends the work of the tools, and what is fetched for it. */
    this.ending = new AbortController();
    /** Ends what is shown instead of the result. */
    this.showing = new AbortController();
    this.timer = 0;
    /** The key of those labels as segmented that are kept with their corrections. */
    this.segmented = "";
    this.panel = new CorrectPanel(
      {
        travel: (direction) => this.#travel(direction),
        keep: () => this.mode && this.annotated.add(this.mode.editor, this.at),
        improve: () => this.mode && this.annotated.improve(this.mode.editor, this.at),
        save: (kind) => this.#save(kind),
        discard: () => this.#discard(),
      },
      abilities,
    );
    this.root = this.panel.root;
    this.annotated = new AnnotatedStacks({ job, stack }, this.stem, abilities, this.panel);
    signal.addEventListener("abort", () => this.leave(false));
    this.countKept();
  }

  /** Tell how many corrections are kept of what is shown. */
  async countKept() {
    const edits = await kept.count(this.key);
    this.#tell("kept", { edits, objects: null });
    if (edits > 0) await this.show();
  }

  /** @param {string} name @param {unknown} detail */
  #tell(name, detail) {
    this.root.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Where the corrections of what is shown are kept. */
  get key() {
    return kept.keyOf(this.job, this.at);
  }

  /** @param {number} time point that is shown @param {boolean} correcting whether the reader goes on correcting there */
  async goTo(time, correcting) {
    this.at = time;
    if (correcting) await this.enter();
    else await this.countKept();
  }

  /** Show the labels in full resolution, with what was corrected before, and the tools. @param {boolean} [force] also where another tab corrects them */
  async enter(force = false) {
    this.#restore();
    const { labels } = this.viewer.scene.state;
    const refusal = labels === null ? NO_LABELS : refusalOf(labels);
    if (refusal) return this.panel.refuse(refusal);
    this.panel.wait("Fetching the labels");
    const signal = this.#begin();
    const { key } = this;
    signal.addEventListener("abort", () => kept.disown(key));
    if (!(await kept.own(key, force))) return this.#offer(ELSEWHERE, "Go on here", true);
    if (signal.aborted) return kept.disown(key);
    kept.whenTaken(key, () => this.#lose(), signal);
    try {
      const { editor, fitting } = await this.#open(signal);
      if (signal.aborted) return undefined;
      this.#showTools(editor);
      await this.#sayKept(editor.done.length, fitting);
    } catch (error) {
      if (!signal.aborted) this.panel.refuse(/** @type {Error} */ (error).message);
    }
    return undefined;
  }

  /** End what was begun before. @returns {AbortSignal} ends what begins now */
  #begin() {
    this.ending.abort();
    this.ending = new AbortController();
    return this.ending.signal;
  }

  /** @param {number} edits that were kept @param {boolean} fitting whether they are of these labels */
  async #sayKept(edits, fitting) {
    if (!fitting) {
      await kept.keep(this.key, 0, null);
      this.panel.say("The corrections that were kept do not fit this result, and are gone.");
    } else if (edits > 0)
      this.panel.say(`${counted(edits, "correction")} of earlier ${edits === 1 ? "is" : "are"} back.`);
  }

  /** Show the corrected labels without the tools, where there are any and all of the stack is here. */
  async show() {
    const { labels } = this.viewer.scene.state;
    if (this.mode || this.job.time_points || !labels || !isFine(labels) || refusalOf(labels)) return;
    const signal = this.#begin();
    try {
      await this.#open(signal);
    } catch {
      // What keeps the labels from being corrected is told under Correct.
    }
    if (!signal.aborted) this.leave();
  }

  /** @param {string} text why nothing is corrected here now @param {string} action that begins @param {boolean} force */
  #offer(text, action, force) {
    this.panel.offer(text, action, () => this.enter(force));
  }

  /** Another tab has taken over. */
  #lose() {
    this.leave();
    this.#offer(TAKEN, "Go on here", true);
  }

  /** Show the labels with what was corrected before. @param {AbortSignal} signal @returns {Promise<{editor: LabelEditor, fitting: boolean}>} fitting: the corrections are of these labels */
  async #open(signal) {
    const { viewer, job } = this;
    const { image, labels, overlays } = viewer.scene.state;
    if (image === null || labels === null) throw new Error(NO_LABELS);
    const parameters = job.time_points ? { time: Math.max(0, this.at - firstTime(job.parameters.time)) } : {};
    const own = await fetchLabels(labels, { address: `jobs/${job.id}/planes`, parameters }, viewer, signal);
    const whole = (await fetchImage(image, viewer, signal)) ?? own;
    const edits = await kept.load(this.key);
    signal.throwIfAborted();
    const editor = new LabelEditor(own, edgesOfWhole(viewer.scene.state, image));
    const fitting = editor.restore(edits);
    // Other channels of a large stack are here in coarse steps, which do not fit.
    if (whole !== image) viewer.scene.set({ overlays: [] });
    showImage(viewer, whole);
    viewer.setLabels(own);
    this.mode = { editor, image: whole, before: { image, labels, overlays } };
    this.showing = new AbortController();
    viewer.addEventListener("draw", () => this.#pauseIfCoarse(), { signal: this.showing.signal });
    return { editor, fitting };
  }

  /** Give the reader the tools. @param {LabelEditor} editor */
  #showTools(editor) {
    const { viewer, panel, job } = this;
    const { signal } = this.ending;
    const told = { changed: () => this.#changed(editor), say: (/** @type {string} */ text) => panel.say(text) };
    const tools = new EditTools(viewer, editor, told, signal);
    tools.addEventListener("tool", () => panel.describeTool());
    panel.tools = tools;
    const describeChosen = () => panel.describeChosen(editor, viewer.scene.state);
    viewer.addEventListener("draw", describeChosen, { signal });
    for (const root of [viewer.root, this.root])
      root.addEventListener("keydown", (event) => this.#onKey(event), { signal });
    panel.show(
      job.time_points
        ? `These are the labels of time point ${this.at}; each is corrected for itself. The table under Objects is as segmented.`
        : "The table under Objects follows when you go there.",
    );
    this.#count(editor);
    describeChosen();
    this.annotated.describe();
    tools.use("look");
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const { tools } = this.panel;
    const action = tools && actionOfKey(event, tools, (direction) => this.#travel(direction));
    if (!action) return;
    event.preventDefault();
    action();
  }

  /**
   * Put the tools away; the corrections stay.
   * @param {boolean} [shown] whether corrected labels go on being shown, where there are any; "corrected" tells of them
   */
  leave(shown = true) {
    const { mode, panel } = this;
    panel.tools?.use("look");
    this.ending.abort();
    this.viewer.waiting.textContent = "";
    if (mode === null) return;
    panel.tools = null;
    const corrected = shown && mode.editor.done.length > 0 && !this.job.time_points && !this.signal.aborted;
    if (!corrected) this.#restore();
    this.#tell("corrected", corrected ? this.#measure(mode) : null);
  }

  /** Show the labels as they were segmented, unless something else is shown by now. */
  #restore() {
    const { mode, viewer } = this;
    this.mode = this.panel.tools = null;
    this.showing.abort();
    if (mode === null) return;
    const { image, labels, overlays } = mode.before;
    if (viewer.scene.state.image === mode.image && mode.image !== image) {
      viewer.scene.set({ overlays });
      showImage(viewer, image);
    }
    if (viewer.scene.state.labels === mode.editor.labels) viewer.setLabels(labels);
  }

  /** Measure the corrected objects. @param {Mode} mode */
  #measure({ editor, image }) {
    const grey = image === editor.labels ? null : image;
    return measure(editor.labels, grey, editor.objects.keys(), this.viewer.scene.state.known ? editor.voxel : null);
  }

  /** Another channel of a large stack comes in coarse steps first, which the labels do not fit. */
  #pauseIfCoarse() {
    const { image } = this.viewer.scene.state;
    if (image === null || isFine(image)) return;
    const correcting = this.panel.tools !== null;
    this.leave(false);
    if (correcting) this.#offer("The stack is shown anew. Your corrections are kept.", "Go on correcting", false);
  }

  /** Say how much was corrected. @param {LabelEditor} editor */
  #count(editor) {
    this.panel.count(editor);
    this.#tell("kept", { edits: editor.done.length, objects: editor.objects.size });
  }

  /** Show and keep the newest correction. @param {LabelEditor} editor */
  #changed(editor) {
    const { done } = editor;
    this.#count(editor);
    this.#keepEdit(done.length - 1, done[done.length - 1]);
    this.#refreshSolid();
  }

  /** @param {"undo" | "redo"} direction */
  #travel(direction) {
    const { mode, panel } = this;
    const edit = panel.tools?.[direction]();
    if (!mode || !edit) return;
    panel.sayTravelled(direction, edit.kind);
    const { done } = mode.editor;
    this.#keepEdit(direction === "undo" ? done.length : done.length - 1, direction === "undo" ? null : edit);
    this.#count(mode.editor);
    this.#refreshSolid();
  }

  async #discard() {
    const { mode, panel } = this;
    if (mode === null || mode.editor.done.length === 0) return;
    const edits = mode.editor.done.length;
    while (mode.editor.undo() !== null);
    panel.tools?.cancel();
    await kept.keep(this.key, 0, null);
    this.#count(mode.editor);
    this.#refreshSolid();
    panel.say(`${counted(edits, "correction")} discarded. Redo brings them back, one by one.`);
  }

  /** @param {number} number @param {import("../volumes/label_edit.js").Edit | null} edit */
  async #keepEdit(number, edit) {
    const where = await kept.keep(this.key, number, edit);
    if (where === "nowhere")
      this.panel.say("This browser keeps no corrections: they are lost when the page is closed.");
    if (where === "elsewhere") this.#lose();
    if (where === "kept" && edit !== null) await this.#keepSegmented();
  }

  /** Keep the labels as segmented beside their corrections: the service may forget the result. */
  async #keepSegmented() {
    const { mode, key } = this;
    if (mode === null || this.segmented === key) return;
    this.segmented = key;
    if (await kept.loadSegmented(key)) return;
    const data = mode.editor.original();
    const zipped = await gzip(new Blob([/** @type {BlobPart} */ (data)]));
    const { shape } = mode.editor.labels;
    await kept.keepSegmented(key, { zipped, bytes: data.BYTES_PER_ELEMENT, shape, voxelSize: this.#voxelSize() });
  }

  /** The solid is made of copies: make them again when nothing has changed for a moment. */
  #refreshSolid() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.viewer.corner.refreshSolid(), SOLID_MILLISECONDS);
  }

  /** The voxel size in the form that files state it. */
  #voxelSize() {
    const [z, y, x] = this.mode?.editor.voxel ?? [1, 1, 1];
    return this.viewer.scene.state.known ? { z, y, x } : null;
  }

  /** @param {import("./correct_panel.js").FileKind} kind */
  #save(kind) {
    const { mode } = this;
    if (mode === null) return;
    const { labels } = mode.editor;
    const files = {
      csv: () => new Blob([asCsv(this.#measure(mode))], { type: "text/csv" }),
      npy: () => asNpy(labels),
      "ome.tif": () => asTiff(labels, this.#voxelSize()),
    };
    save(files[kind](), `${this.stem}_corrected.${kind}`);
  }
}
