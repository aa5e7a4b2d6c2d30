/** Gallery of the models: what each model is for, and its result for a part of the open stack. */

import { button, element, formatMessage, openDialog } from "../core/elements.js";
import { isAbort } from "../core/error_bar.js";
import { formatCount } from "../core/format.js";
import { fetchResults, findDoubtedModels } from "../result/advice.js";
import { chooseBox } from "./crop.js";
import { createFacts, createPicture } from "./model_description.js";
import { deletePart, tryModel, uploadPart } from "./trial.js";
import { TrialView } from "./trial_view.js";

/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {import("../stack/session.js").Session} Session */
/** @typedef {import("./trial.js").Part} Part */

const CONFIDENCE_NOTE =
  "The confidence of a calibrated model is the expected match with the true objects. That of other models is often too high, so compare the outlines, too.";

/** Open the gallery. @param {Model[]} models @param {Session | null} session of the open stack, null if no stack is open */
export function openGallery(models, session) {
  const gallery = new Gallery(models, session?.canTryModels ? session : null);
  const title = gallery.session ? "Compare the models on this stack" : "Models";
  const dialog = openDialog(title, gallery.root);
  dialog.classList.add("gallery");
  gallery.closeDialog = () => dialog.close();
  dialog.addEventListener("close", () => gallery.end());
}

/** The cards of the models, and the trial of the models on a part of the stack. */
class Gallery {
  /** @param {Model[]} models @param {Session | null} session */
  constructor(models, session) {
    this.session = session;
    /** @type {() => void} */
    this.closeDialog = () => {};
    this.dialogAbort = new AbortController();
    this.trialAbort = new AbortController();
    const currentModel = session?.settings.parameters.model;
    // The selected model is the first one.
    const sortedModels = [...models].sort(
      (first, second) => Number(second.name === currentModel) - Number(first.name === currentModel),
    );
    this.cards = sortedModels.map((model) => new ModelCard(model, model.name === currentModel, this));
    this.statusText = element("p", { class: "muted", role: "status" });
    this.planeSlider = element("input", { type: "range", min: "0", oninput: () => this.#showPlane() });
    this.planeField = element("label", { class: "inline-label", hidden: true }, "Plane", this.planeSlider);
    this.tryButton = element("button", { type: "button", class: "primary", onclick: () => this.#toggleTrial() }, "");
    this.#showTrialState(false);
    this.root = element(
      "div",
      { class: "gallery-body" },
      session && element("div", { class: "row gallery-tools" }, this.tryButton, this.planeField, this.statusText),
      element("ul", { class: "gallery-cards" }, ...this.cards.map((card) => card.root)),
      element(
        "div",
        { class: "row between" },
        element("p", { class: "muted small" }, session ? CONFIDENCE_NOTE : "Open a stack to try the models on it."),
        button("Close", () => this.closeDialog()),
      ),
    );
    if (session) this.statusText.textContent = `Runs every model on ${this.#describeBox()}.`;
  }

  /** Cancel the trial, because the dialog was closed. */
  end() {
    this.trialAbort.abort();
    this.dialogAbort.abort();
  }

  /** @param {boolean} isRunning */
  #showTrialState(isRunning) {
    this.isRunning = isRunning;
    this.tryButton.textContent = isRunning ? "Cancel" : "Try on my stack";
    this.tryButton.className = isRunning ? "secondary" : "primary";
  }

  /** The part of the stack on which the models are tried. */
  get #box() {
    const { file, center } = /** @type {Session} */ (this.session).trialSource;
    const [, z, y, x] = file.shape;
    return chooseBox([z, y, x], center);
  }

  #describeBox() {
    const { shape } = this.#box;
    const { file } = /** @type {Session} */ (this.session).trialSource;
    if (String(shape) === String(file.shape.slice(1))) return "the whole stack, which is small";
    const [z, y, x] = shape;
    return `${x} × ${y} × ${z} voxels around the crosshair. Move the crosshair to try another part`;
  }

  #toggleTrial() {
    if (this.isRunning) this.trialAbort.abort();
    else this.#tryModels();
  }

  /** Try the models one after another. A model that fails does not stop the others. */
  async #tryModels() {
    const session = /** @type {Session} */ (this.session);
    this.trialAbort = new AbortController();
    const { signal } = this.trialAbort;
    this.#showTrialState(true);
    for (const card of this.cards) card.trial.wait();
    /** @type {Part | null} */
    let part = null;
    try {
      part = await uploadPart(session.trialSource, this.#box, signal, (fraction) => {
        this.statusText.textContent = `Reading the part of the stack, ${Math.round(100 * fraction)}%`;
      });
      this.#showPlaneSlider(part);
      for (const [index, card] of this.cards.entries()) {
        this.statusText.textContent = `Trying ${card.model.name}, ${index + 1} of ${this.cards.length}`;
        await this.#tryCard(card, part, session.settings.parameters, signal);
      }
      const { stack, parameters } = session.trialSource;
      this.statusText.textContent = this.#summarize(findDoubtedModels(await fetchResults(stack, signal), parameters));
    } catch (error) {
      this.statusText.replaceChildren(formatMessage(isAbort(error) ? "Canceled" : error));
      for (const card of this.cards) card.trial.cancel();
    } finally {
      this.#showTrialState(false);
      if (part) deletePart(part);
    }
  }

  /** @param {ModelCard} card @param {Part} part @param {Record<string, string>} parameters @param {AbortSignal} signal */
  async #tryCard(card, part, parameters, signal) {
    card.trial.start();
    try {
      card.trial.show(part, await tryModel(part, card.model.name, parameters, signal));
      card.trial.drawPlane(Number(this.planeSlider.value));
    } catch (error) {
      if (signal.aborted) throw error;
      card.trial.fail(/** @type {Error} */ (error).message);
    }
  }

  /** Show the displayed plane of the part. @param {Part} part */
  #showPlaneSlider({ box }) {
    const { center } = /** @type {Session} */ (this.session).trialSource;
    this.planeSlider.max = String(box.shape[0] - 1);
    this.planeSlider.value = String(center[0] - box.start[0]);
    this.planeField.hidden = box.shape[0] === 1;
  }

  #showPlane() {
    for (const { trial } of this.cards) trial.drawPlane(Number(this.planeSlider.value));
  }

  /** Mark the model with the highest confidence. A part can look better than the stack, so models whose results of the stack are doubtful are marked only if all are. @param {string[]} doubted names of these models */
  #summarize(doubted) {
    const getConfidence = (/** @type {ModelCard} */ { trial }) => trial.outcome?.confidence ?? -1;
    const newCards = this.cards.filter((card) => !doubted.includes(card.model.name) && getConfidence(card) >= 0);
    const candidates = newCards.length ? newCards : this.cards;
    const best = candidates.reduce((first, card) => (getConfidence(card) > getConfidence(first) ? card : first));
    for (const card of this.cards) card.setBest(card === best && getConfidence(best) >= 0);
    const failed = this.cards.filter(({ trial }) => trial.outcome === null).length;
    const failureText = failed ? ` ${formatCount(failed, "model")} cannot segment it.` : "";
    if (getConfidence(best) < 0) return `No model reports a confidence.${failureText}`;
    const doubtText =
      newCards.length && doubted.length
        ? ` Not counting ${doubted.join(" and ")}, with low confidence in the whole stack.`
        : "";
    return `Highest confidence: ${best.model.name}, ${Math.round(100 * getConfidence(best))}%.${doubtText}${failureText}`;
  }

  /** Segment the whole stack with a model and the settings of the trial. @param {Model} model */
  async useModel(model) {
    const session = /** @type {Session} */ (this.session);
    this.closeDialog();
    await session.segmentWith({ model: model.name, diameter: session.settings.parameters.diameter ?? "" });
  }
}

/** A model with its description and its trial. */
class ModelCard {
  /** @param {Model} model @param {boolean} isSelected @param {Gallery} gallery */
  constructor(model, isSelected, gallery) {
    this.model = model;
    this.trial = new TrialView(model.name);
    const canSegment = gallery.session !== null && model.input;
    this.useButton = button(`Segment the stack with ${model.name}`, () => gallery.useModel(model), "secondary");
    const marks = [isSelected && "selected", model.calibrated && "calibrated"].filter(Boolean).join(" · ");
    this.root = element(
      "li",
      { class: "gallery-card" },
      element(
        "div",
        { class: "row between" },
        element("h3", {}, model.name),
        element("span", { class: "muted small" }, marks),
      ),
      element("p", {}, model.summary ?? ""),
      model.problem !== null && element("p", { class: "warning-text" }, formatMessage(model.problem)),
      element(
        "div",
        { class: "gallery-pictures" },
        createPicture(model, gallery.dialogAbort.signal),
        this.trial.figure,
      ),
      this.trial.text,
      canSegment && this.useButton,
      createFacts(model),
    );
  }

  /** @param {boolean} isBest whether the model has the highest confidence */
  setBest(isBest) {
    this.root.classList.toggle("best", isBest);
    this.useButton.className = isBest ? "primary" : "secondary";
  }
}
