/** Objects that a model suggests for an annotation. The user accepts suggested objects by clicking them. */

import { button, element, formatMessage } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { pollJob } from "../core/job_requests.js";
import { toPageTerms } from "../core/terminology.js";
import { describeProgress } from "../result/progress_view.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { fetchShape, fetchVolume } from "../volumes/planes.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {import("./label_sources.js").LabelSource} LabelSource */

/** The suggested objects. */
export class Suggestions {
  /** @param {import("../volumes/planes.js").Volume} labels of the suggested objects @param {import("../volumes/planes.js").Triple} voxelSize in micrometers */
  constructor(labels, voxelSize) {
    this.suggested = new LabelEditor(labels, voxelSize);
    /** Ids of the accepted objects in the annotation, by id of the suggestion. @type {Map<number, number>} */
    this.acceptedIds = new Map();
    /** Colors of the suggested objects: gray. */
    this.colorIndices = new Uint8Array(this.suggested.maxId + 1);
  }

  get labels() {
    return this.suggested.labels;
  }

  /** @param {LabelEditor} editor of the annotation @returns {number[]} ids of the suggestions that have not been accepted */
  listOpenIds(editor) {
    return [...this.suggested.objects.keys()].filter((id) => !this.#isAccepted(id, editor));
  }

  /** Return flags that hide the accepted suggestions. @param {LabelEditor} editor of the annotation */
  createHiddenFlags(editor) {
    const flags = new Uint8Array(this.suggested.maxId + 1);
    for (const id of this.acceptedIds.keys()) if (this.#isAccepted(id, editor)) flags[id] = 1;
    return flags;
  }

  /** Return whether a suggestion was accepted and the object still exists, because the user can undo. @param {number} id @param {LabelEditor} editor of the annotation */
  #isAccepted(id, editor) {
    return editor.objects.has(this.acceptedIds.get(id) ?? 0);
  }

  /** @param {import("../volumes/planes.js").Triple} position @param {LabelEditor} editor of the annotation @returns {number} id of the suggestion at a voxel, 0 if there is none */
  idAt(position, editor) {
    const id = this.suggested.idAt(position);
    return this.#isAccepted(id, editor) ? 0 : id;
  }

  /** Copy suggested objects to the annotation. @param {number[]} ids of suggestions @param {LabelEditor} editor of the annotation */
  accept(ids, editor) {
    const { edit, newIds } = editor.addObjects(this.suggested, ids);
    for (const [index, id] of ids.entries()) this.acceptedIds.set(id, newIds[index]);
    return edit;
  }
}

/** Controls that request suggestions, and accept them. */
export class SuggestionControls {
  /** @param {() => EditTools | null} getTools returns the active tools */
  constructor(getTools) {
    this.getTools = getTools;
    /** @type {LabelSource | null} */
    this.source = null;
    /** Cancels the request for suggestions. */
    this.signal = new AbortController().signal;
    this.text = element("p", { class: "muted small", role: "status" });
    this.suggestButton = button("Suggest objects", () => this.#suggest(), "secondary");
    this.acceptButton = button("Accept by click", () => this.getTools()?.activate("accept"), "secondary");
    this.acceptAllButton = button("Accept all", () => this.#acceptAll(), "link");
    this.root = element(
      "div",
      { class: "suggestions" },
      element("div", { class: "row" }, this.suggestButton, this.acceptButton, this.acceptAllButton),
      this.text,
    );
  }

  /** Show the controls for other labels. @param {LabelSource} source @param {AbortSignal} signal ends the work on these labels */
  reset(source, signal) {
    this.source = source;
    this.signal = signal;
    this.root.hidden = source.startJob === null;
    this.text.textContent = "The selected model can suggest objects, from which you choose the correct ones.";
    this.update();
  }

  update() {
    const tools = this.getTools();
    const suggestions = tools?.suggestions ?? null;
    this.acceptButton.hidden = this.acceptAllButton.hidden = suggestions === null;
    if (tools === null || suggestions === null) return;
    this.acceptButton.setAttribute("aria-pressed", String(tools.tool === "accept"));
    const openCount = suggestions.listOpenIds(tools.editor).length;
    this.acceptAllButton.hidden = openCount === 0;
    this.text.textContent = openCount
      ? `${formatCount(openCount, "suggested object")}, shown in gray.`
      : "All suggested objects are accepted.";
  }

  async #suggest() {
    const { source, signal } = this;
    const tools = this.getTools();
    if (tools === null || source?.startJob === undefined || source.startJob === null) return;
    try {
      const labels = await this.#fetchSuggestions(source.startJob, tools.editor.labels.shape, signal);
      tools.showSuggestions(new Suggestions(labels, tools.editor.voxelSize));
      this.update();
    } catch (error) {
      if (!signal.aborted) this.text.replaceChildren(formatMessage(error));
    }
  }

  /** Segment the stack. @param {() => Promise<import("openapi").JobReport>} startJob @param {import("../volumes/planes.js").Triple} shape of the annotation @param {AbortSignal} signal */
  async #fetchSuggestions(startJob, shape, signal) {
    this.text.textContent = "Starting the model";
    const { id } = await startJob();
    const job = await pollJob(id, signal, (report) => {
      this.text.textContent = `${describeProgress(report)}.`;
    });
    if (job.state !== "done") throw new Error(toPageTerms(job.problem?.detail ?? "The model was stopped. Try again."));
    if (!job.objects)
      throw new Error("The model found no objects. Select another model or another object diameter, and try again.");
    const source = { url: `jobs/${id}/planes`, parameters: {} };
    const fullShape = await fetchShape(source, signal);
    if (String(fullShape) !== String(shape))
      throw new Error("The model segmented another part of the stack. Try again.");
    return fetchVolume({ ...source, fullShape }, signal, () => undefined, [1, 1, 1]);
  }

  #acceptAll() {
    const tools = this.getTools();
    if (tools?.suggestions) tools.accept(tools.suggestions.listOpenIds(tools.editor));
  }
}
