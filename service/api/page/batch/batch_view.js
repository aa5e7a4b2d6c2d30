/** View of a batch: settings for all stacks, the list of stacks, and files with all results. */

import { connection } from "../core/connection.js";
import { button, element, redraw } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { formatCount, formatDuration, formatNumber } from "../core/format.js";
import { formatLengths } from "../core/terminology.js";
import { openGallery } from "../gallery/gallery.js";
import { SettingsView } from "../stack/settings_view.js";
import { saveArchive, saveReport, saveTable } from "./batch_results.js";
import { selectChosenFiles } from "./collect_files.js";
import { countObjects, loadCorrectionCounts } from "./corrections.js";
import { getPhase, isPending } from "./entries.js";
import { openEntryDialog } from "./entry_dialog.js";
import { EntryRow } from "./entry_row.js";
import { findSharedDiameter } from "./shared_diameter.js";
import { SharedMetadataControls } from "./shared_metadata.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */

const ENDED_PHASES = ["done", "failed", "cancelled", "expired", "gone", "problem"];
const DIAMETER_ADVICE =
  "The object diameter was estimated for each stack. To treat all stacks alike, use one diameter, and segment them again.";
const FAILED_PHASES = ["failed", "expired", "gone", "problem"];

/** Show a batch until the signal is aborted. The batch continues afterwards. */
export class BatchView {
  /**
   * @param {HTMLElement} root @param {Batch} batch @param {import("../stack/session.js").Service} service
   * @param {(entry: Entry) => void} openEntry opens the stack or the result of an entry @param {AbortSignal} signal
   */
  constructor(root, batch, service, openEntry, signal) {
    this.batch = batch;
    this.models = service.models.filter((model) => model.input);
    this.actions = {
      open: openEntry,
      edit: (/** @type {Entry} */ entry) => openEntryDialog(batch, entry, this.models),
    };
    const settingsPanel = element("section", {
      class: "panel batch-settings",
      "aria-label": "Settings for all stacks",
    });
    this.settings = new SettingsView(settingsPanel, service);
    this.settings.nameHeading.textContent = "Settings for all stacks";
    this.settings.annotateButton.hidden = true;
    // Models are tried on one open stack.
    if (this.settings.galleryButton) this.settings.galleryButton.textContent = "About the models";
    this.settings.restore({ ...batch.parameters });
    this.settings.addEventListener("change", () => batch.setParameters(this.settings.parameters));
    this.settings.addEventListener("run", () => batch.run());
    this.settings.addEventListener("gallery", () => openGallery(this.models, null));
    this.sharedControls = new SharedMetadataControls(this.settings.metadata.root, batch, this.models);
    this.settings.metadata.root.classList.add("controls");
    this.summaryText = element("p", { class: "big", role: "status" });
    this.progressBar = element("progress", { max: 1, "aria-label": "Finished stacks" });
    this.cancelButton = button("Cancel all", () => batch.cancelAll(), "secondary");
    this.resultButtons = element("div", { class: "row" });
    this.exportText = element("p", { class: "muted small", role: "status" });
    this.diameterAdvice = element("div", { class: "row" });
    this.sharedDiameter = "";
    this.list = element("ul", { class: "batch-list", "aria-label": "Stacks" });
    this.skippedRoot = element("div");
    /** @type {Map<Entry, EntryRow>} */
    this.rows = new Map();
    this.skippedCount = -1;
    /** The corrected results of this browser. @type {import("./corrections.js").CorrectionCounts} */
    this.correctionCounts = new Map();
    const content = element(
      "section",
      { class: "batch-content", "aria-label": "Stacks of the batch" },
      element(
        "div",
        { class: "batch-head" },
        element("div", { class: "row between" }, this.summaryText, this.cancelButton),
        this.progressBar,
        this.resultButtons,
        this.exportText,
        this.diameterAdvice,
      ),
      this.list,
      this.skippedRoot,
      this.#createFileButtons(),
    );
    root.replaceChildren(settingsPanel, content);
    this.#createResultButtons();
    this.frame = 0;
    batch.addEventListener("change", () => this.#updateLater(), { signal });
    connection.subscribe(() => this.#updateLater(), signal);
    signal.addEventListener("abort", () => cancelAnimationFrame(this.frame));
    this.#update();
    this.#loadCorrectionCounts();
  }

  async #loadCorrectionCounts() {
    this.correctionCounts = await loadCorrectionCounts();
    if (this.correctionCounts.size > 0) this.#updateLater();
  }

  #createFileButtons() {
    const { batch } = this;
    const input = element("input", {
      type: "file",
      multiple: true,
      // The button opens the file dialog.
      hidden: true,
      "aria-label": "More files for this batch",
      onchange: () => {
        selectChosenFiles(input)
          .list()
          .then((found) => batch.addFiles(found), showError);
      },
    });
    return element(
      "div",
      { class: "row" },
      button("Add files", () => input.click(), "secondary"),
      input,
    );
  }

  #createResultButtons() {
    const { batch } = this;
    const showProgress = (/** @type {string} */ text) => {
      this.exportText.textContent = text;
    };
    /** @param {string} text @param {(batch: Batch, showProgress: (text: string) => void) => unknown} save */
    const create = (text, save) =>
      button(
        text,
        async () => {
          try {
            await save(batch, showProgress);
          } catch (error) {
            showProgress("");
            showError(error);
          }
        },
        "secondary",
      );
    this.tableButton = create("Table (CSV)", saveTable);
    this.archiveButton = create("Labels, table and report (ZIP)", saveArchive);
    this.reportButton = create("Report (HTML)", saveReport);
    this.resultButtons.replaceChildren(this.tableButton, this.reportButton, this.archiveButton);
  }

  /** Update at most once per frame. */
  #updateLater() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#update());
  }

  #update() {
    const { batch, rows } = this;
    for (const [entry, row] of rows) {
      if (batch.entries.includes(entry)) continue;
      row.root.remove();
      rows.delete(entry);
    }
    for (const entry of batch.stacks) {
      const row = rows.get(entry);
      if (row) row.update(this.correctionCounts);
      else {
        const newRow = new EntryRow(batch, entry, this.actions, this.correctionCounts);
        rows.set(entry, newRow);
        this.list.append(newRow.root);
      }
    }
    this.sharedControls.update();
    this.#updateSummary();
    this.#updateSkipped();
    this.#updateDiameterAdvice();
    this.#updateRunBox();
  }

  /** Offer one object diameter for all stacks, so that their results can be compared. */
  #updateDiameterAdvice() {
    const { batch, settings } = this;
    const diameter = batch.stacks.some(isPending) ? "" : findSharedDiameter(batch.stacks);
    if (diameter === this.sharedDiameter) return;
    this.sharedDiameter = diameter;
    redraw(this.diameterAdvice, () => [
      diameter !== "" && element("p", { class: "muted small" }, DIAMETER_ADVICE),
      diameter !== "" &&
        button(
          `Use the median for all stacks: ${formatLengths(diameter)}`,
          () => {
            settings.restore({ ...batch.parameters, diameter });
            batch.setParameters(settings.parameters);
          },
          "secondary",
        ),
    ]);
  }

  #updateSummary() {
    const { batch } = this;
    const { stacks } = batch;
    const phases = stacks.map(getPhase);
    const count = (/** @type {string[]} */ names) => phases.filter((phase) => names.includes(phase)).length;
    const doneCount = count(["done"]);
    const failedCount = count(FAILED_PHASES);
    const objects = stacks.reduce(
      (sum, entry, index) => sum + (phases[index] === "done" ? countObjects(entry, this.correctionCounts).shown : 0),
      0,
    );
    const questionCount = count(["question"]);
    const missingCount = count(["missing"]);
    const text = [
      doneCount > 0 || stacks.some(isPending)
        ? `${doneCount} of ${formatCount(stacks.length, "stack")} segmented, ${formatCount(objects, "object")}`
        : formatCount(stacks.length, "stack"),
      questionCount > 0 && `${formatCount(questionCount, "needs", "need")} a setting`,
      failedCount > 0 && `${formatNumber(failedCount)} failed`,
      missingCount > 0 && `${formatNumber(missingCount)} not uploaded: press Add files and choose them again`,
    ]
      .filter(Boolean)
      .join(" · ");
    if (this.summaryText.textContent !== text) this.summaryText.textContent = text;
    this.progressBar.value = stacks.length ? count(ENDED_PHASES) / stacks.length : 0;
    const isActive = stacks.some(isPending) || count(["queued", "uploading", "requested"]) > 0;
    this.cancelButton.disabled = !isActive;
    this.progressBar.hidden = doneCount === 0 && !isActive;
    for (const node of [this.tableButton, this.archiveButton, this.reportButton])
      if (node) node.disabled = doneCount === 0;
  }

  #updateSkipped() {
    const skipped = this.batch.entries.filter((entry) => entry.skipReason !== "");
    if (this.skippedCount === skipped.length) return;
    this.skippedCount = skipped.length;
    redraw(this.skippedRoot, () => [
      skipped.length > 0 &&
        element(
          "details",
          { class: "batch-skipped", open: skipped.length <= 10 },
          element("summary", {}, `${formatCount(skipped.length, "file")} left out`),
          element(
            "ul",
            { class: "notes" },
            ...skipped.map(({ path, skipReason }) => element("li", {}, element("strong", {}, path), ` ${skipReason}`)),
          ),
        ),
    ]);
  }

  #updateRunBox() {
    const { batch, settings } = this;
    const runnable = batch.listRunnable();
    settings.runButton.disabled = runnable.length === 0;
    const hasResults = runnable.some(({ job }) => job !== "");
    const text = runnable.length
      ? `Segment ${formatCount(runnable.length, "stack")}${hasResults ? " again" : ""}`
      : "Segment";
    if (settings.runButton.textContent !== text) settings.runButton.textContent = text;
    const seconds = runnable.map(({ inspection }) => inspection?.seconds ?? null);
    const total = seconds.reduce((sum, value) => (sum === null || value === null ? null : sum + value), 0);
    const isFinished = runnable.length === 0 && batch.stacks.some((entry) => getPhase(entry) === "done");
    settings.estimateText.textContent =
      isFinished && !batch.stacks.some(isPending)
        ? "No stack is left to segment with these settings."
        : runnable.length && total
          ? `about ${formatDuration(total)}`
          : "";
    const model = this.models.find(({ name }) => name === batch.parameters.model);
    if (settings.modelSummary) settings.modelSummary.textContent = model?.summary ?? "";
  }
}
