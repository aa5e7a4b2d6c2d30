/** Progress and result of a training run, and the list of training runs. */

import { button, element, formatMessage, redraw } from "../core/elements.js";
import { formatAge, formatCount, formatDuration, formatNumber } from "../core/format.js";
import { Problem, request, requestJson, requestWithoutPrompt } from "../core/requests.js";
import { toPageTerms } from "../core/terminology.js";
import { LineChart } from "./curves.js";

/** @typedef {import("openapi").TrainingReport} TrainingRun */

const POLL_INTERVAL_MILLISECONDS = 1000;

const STAGE_TITLES = /** @type {Record<string, string>} */ ({
  reading: "Reading the annotated stacks",
  scoring: "Evaluating the base model",
  learning: "Training",
  finishing: "Saving the new model",
  evaluating: "Evaluating the new model",
  serving: "Loading the new model",
});

/** Counts and scores of both models in the message of a training run. They are displayed above the message, the scores on hover. */
const COUNTS_PATTERN = /: before training, (.*?) \((.*?)\); after training, (.*?) \((.*?)\)/;

/** @param {TrainingRun} trainingRun */
function isFinished({ state }) {
  return state !== "waiting" && state !== "running";
}

/**
 * Show a training run, and poll it until it is finished or another view opens.
 * @param {HTMLElement} root @param {string} id @param {AbortSignal} signal
 * @param {{openAnnotation: (annotation: string, model: string) => void}} actions openAnnotation: opens the stack of an annotation and selects a model
 */
export async function watchTraining(root, id, signal, actions) {
  const view = new TrainingView(root, id, actions);
  for (;;) {
    try {
      /** @type {TrainingRun} */
      const trainingRun = await requestJson(`trainings/${id}`, { signal });
      view.show(trainingRun);
      if (isFinished(trainingRun)) return;
    } catch (error) {
      if (signal.aborted) return;
      // If the service does not respond, keep trying, because the service may be restarting.
      if (!(error instanceof Problem) || error.status !== 0) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MILLISECONDS));
    if (signal.aborted) return;
  }
}

/** The progress, loss curves and result of a training run. */
class TrainingView {
  /** @param {HTMLElement} root @param {string} id @param {{openAnnotation: (annotation: string, model: string) => void}} actions */
  constructor(root, id, actions) {
    this.actions = actions;
    this.stateText = element("p", { class: "big", role: "status" }, "Loading the progress");
    this.progressBar = element("progress", { max: 1, "aria-label": "Progress of the training" });
    this.detailText = element("p", { class: "muted" });
    this.curves = new LineChart("Error (loss)", ["training", "validation"]);
    this.scoreCurve = new LineChart("Match with the annotated objects", ["held-out parts"]);
    this.result = element("div", { class: "training-result" });
    this.stopButton = button(
      "Stop the training",
      async () => {
        this.stopButton.disabled = true;
        await request(`trainings/${id}`, { method: "DELETE" }).catch(() => undefined);
      },
      "secondary",
    );
    this.note = element("p", { class: "muted small" }, "You can leave this page. The training continues.");
    root.replaceChildren(
      element(
        "section",
        { class: "card training", "aria-label": "Training" },
        this.stateText,
        this.progressBar,
        this.detailText,
        this.result,
        this.scoreCurve.root,
        this.curves.root,
        this.stopButton,
        this.note,
      ),
    );
  }

  /** @param {TrainingRun} trainingRun */
  show(trainingRun) {
    const { state, stage, step, steps, seconds_left: secondsLeft, loss, validation, f1 } = trainingRun;
    this.stateText.textContent = describeTrainingRun(trainingRun);
    this.progressBar.hidden = this.stopButton.hidden = this.note.hidden = isFinished(trainingRun);
    if (stage === "learning" && steps) this.progressBar.value = Math.min(1, step / steps);
    else this.progressBar.removeAttribute("value");
    this.detailText.textContent = [
      step > 0 && formatCount(step, "step"),
      state === "running" && secondsLeft !== null && `${formatDuration(secondsLeft)} left`,
    ]
      .filter(Boolean)
      .join(", ");
    this.curves.show([loss, validation]);
    this.scoreCurve.show([f1]);
    this.#showResult(trainingRun);
  }

  /** Create a button that deletes the model. The button is hidden unless the client has permission to delete the model. @param {TrainingRun} trainingRun @param {string} model */
  #createDeleteButton(trainingRun, model) {
    const deleteModel = async () => {
      if (!confirm(`Delete the model ${model} and its files?`)) return;
      try {
        await requestWithoutPrompt(`models/${model}`, { method: "DELETE" });
        this.show({ ...trainingRun, model: null });
      } catch (error) {
        deleteButton.replaceWith(element("p", { class: "warning-text" }, formatMessage(error)));
      }
    };
    const deleteButton = button("Delete the model", deleteModel, "link");
    deleteButton.hidden = true;
    requestJson(`models/${model}`).then(
      ({ removable }) => (deleteButton.hidden = !removable),
      () => undefined,
    );
    return deleteButton;
  }

  /** @param {TrainingRun} trainingRun */
  #showResult(trainingRun) {
    const { before: scoreBefore, after: scoreAfter, better, message, model, state, annotations } = trainingRun;
    const hasScores = scoreBefore !== null && scoreAfter !== null;
    const [, countsBefore, scoresBefore, countsAfter, scoresAfter] = COUNTS_PATTERN.exec(message) ?? [];
    const hasModel = state === "done" && model !== null;
    const hasFailed = better === false || state === "failed";
    redraw(this.result, () => [
      hasScores &&
        element(
          "dl",
          { class: "scores" },
          createScore("Base model", countsBefore ?? formatPercent(scoreBefore), scoresBefore),
          createScore("New model", countsAfter ?? formatPercent(scoreAfter), scoresAfter),
        ),
      hasScores &&
        element(
          "p",
          { class: "muted small", title: "The score is F1 at an intersection over union of 0.5." },
          "Measured on held-out parts of the annotated stacks. An object is correct if it overlaps an annotated one by more than 50%.",
        ),
      message &&
        element(
          "p",
          { class: hasFailed ? "warning-text" : "muted" },
          formatMessage(toPageTerms(message.replace(COUNTS_PATTERN, ""))),
        ),
      hasFailed &&
        annotations.length > 0 &&
        element("p", {}, element("a", { href: `#annotated=${annotations[0]}` }, "Continue the annotation")),
      hasModel &&
        annotations.length > 0 &&
        button(
          `Open the stack with ${model}`,
          () => this.actions.openAnnotation(annotations[0], model),
          better === false ? "secondary" : "primary",
        ),
      hasModel && this.#createDeleteButton(trainingRun, model),
    ]);
  }
}

/** @param {string} title @param {string} text @param {string} [scores] displayed on hover */
function createScore(title, text, scores = "F1 score") {
  return element("div", { title: scores }, element("dt", {}, title), element("dd", {}, text));
}

/** @param {TrainingRun} trainingRun */
function describeTrainingRun({ state, stage, name, better, position, model }) {
  if (state === "done" && model === null) return `The model ${name} was deleted`;
  if (state === "done")
    return better === false ? `${name} is ready, but not better than the base model` : `${name} is ready`;
  if (state === "waiting" && position !== null && position > 1)
    return `${formatCount(position - 1, "training run")} ahead in the queue`;
  if (state === "running") return describeStage(stage);
  return (
    {
      waiting: "Waiting to start",
      failed: "The training failed",
      unimproved: `The training did not improve the model, so ${name} was not kept`,
      cancelled: "The training was stopped",
      interrupted: "The training was interrupted because the service stopped. Start the training again.",
    }[state] ?? state
  );
}

/** Describe the stage of a training run in progress. @param {string | null} stage */
export function describeStage(stage) {
  return STAGE_TITLES[stage ?? "learning"] ?? STAGE_TITLES.learning;
}

/** @param {number} fraction */
function formatPercent(fraction) {
  return `${formatNumber(100 * fraction)}%`;
}

/** Create the list of training runs for the start screen. @returns {Promise<HTMLElement | null>} null if there are no training runs */
export async function createTrainingRunsList() {
  /** @type {TrainingRun[]} */
  const trainingRuns = (await requestJson("trainings")).trainings;
  if (trainingRuns.length === 0) return null;
  return element(
    "section",
    { class: "recent", "aria-labelledby": "trainings-title" },
    element("h2", { id: "trainings-title" }, "Training runs"),
    element(
      "ul",
      {},
      ...trainingRuns.map((trainingRun) =>
        element(
          "li",
          { class: "without-thumbnail" },
          element(
            "a",
            { class: "recent-text", href: `#training=${trainingRun.id}` },
            element("strong", {}, trainingRun.name),
            element(
              "span",
              { class: "muted" },
              `${describeTrainingRun(trainingRun)} · ${formatAge(trainingRun.created)}`,
            ),
          ),
        ),
      ),
    ),
  );
}
