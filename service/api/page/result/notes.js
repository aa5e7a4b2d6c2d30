/** Warnings, advice and notes about a result. */

import { button, element, formatMessage } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { describeSetting, toPageTerms } from "../core/terminology.js";
import {
  countComparableResults,
  describeSettings,
  describeSuggestion,
  findBetterResult,
  findTriedResult,
  formatConfidence,
  getSuggestion,
} from "./advice.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {(changes: Record<string, string>) => Promise<void>} SegmentWith segments the stack again with changed parameters */

const NOT_TRACKED_NOTE =
  "Objects are numbered and colored separately at each time point: object 5 at one time point is not object 5 at the next. To track objects, select “Track objects over time” and segment again.";
/** Maximum number of notes to show expanded. More notes would push the table of objects off the screen of a laptop. */
const MAX_EXPANDED_NOTES = 2;
/** The end of a note about a stated diameter that was replaced, which contains the setting that keeps it. */
const CORRECTION_PATTERN = / To use the specified diameter, set diameter=([\d.,]+(?:px|um))\.$/;
/** The sentence of a warning that contains the suggestion. */
const SUGGESTION_PATTERN = / Try “[^”]*”( to keep only these)?\./;

/**
 * Create the list of warnings, advice and notes.
 * @param {Job} job @param {Job[]} results all results of the stack
 * @param {SegmentWith | null} segmentWith null if the stack is no longer stored @param {() => void} compareModels
 */
export function createNotes(job, results, segmentWith, compareModels) {
  const warning = job.doubt ? toPageTerms(String(job.doubt.detail)) : "";
  const trackingNote = job.time_points && !job.parameters.link && job.objects !== null ? [NOT_TRACKED_NOTE] : [];
  const corrections = segmentWith ? job.warnings.filter((note) => CORRECTION_PATTERN.test(note)) : [];
  const otherNotes = job.warnings.filter((note) => !corrections.includes(note)).map(toPageTerms);
  const notes = [...trackingNote, ...otherNotes.filter((note) => note && note !== warning)];
  const betterResult = findBetterResult(job, results);
  if (!warning && !betterResult && corrections.length === 0 && notes.length === 0) return null;
  return element(
    "ul",
    { class: "notes", "aria-label": "Notes about this result" },
    betterResult && createRecommendation(job, betterResult),
    warning && createWarning(job, warning, results, segmentWith),
    warning && segmentWith && !hasUntriedSuggestion(job, results) && createComparisonAdvice(compareModels),
    ...corrections.map((note) => segmentWith && createCorrectionNote(note, segmentWith)),
    ...(notes.length > MAX_EXPANDED_NOTES
      ? [
          element(
            "li",
            {},
            element("details", {}, element("summary", {}, formatCount(notes.length, "note")), createNoteList(notes)),
          ),
        ]
      : notes.map((note) => element("li", {}, formatMessage(note)))),
  );
}

/** Report that the stated diameter was replaced, and offer to keep it. @param {string} note @param {SegmentWith} segmentWith */
function createCorrectionNote(note, segmentWith) {
  const diameter = CORRECTION_PATTERN.exec(note)?.[1] ?? "";
  return element(
    "li",
    { class: "advice" },
    element("p", {}, formatMessage(toPageTerms(note.replace(CORRECTION_PATTERN, "")))),
    button("Use the specified diameter", () => segmentWith({ diameter }), "secondary"),
  );
}

/** Recommend a result with a higher confidence. @param {Job} job @param {Job} betterResult */
function createRecommendation(job, betterResult) {
  const confidences = `${formatConfidence(betterResult)} instead of ${formatConfidence(job)}`;
  const showBetterResult = () => {
    location.hash = `job=${betterResult.id}`;
  };
  return element(
    "li",
    { class: "advice" },
    element(
      "p",
      {},
      `Another result of this stack has a higher confidence: ${confidences} (${describeSettings(betterResult)}).`,
    ),
    button("Show the better result", showBetterResult, "secondary"),
  );
}

/**
 * Create the warning about a low confidence. Offer its suggestion unless it was tried for this stack.
 * @param {Job} job @param {string} warning @param {Job[]} results @param {SegmentWith | null} segmentWith
 */
function createWarning(job, warning, results, segmentWith) {
  const suggestion = getSuggestion(job);
  const triedResult = suggestion && findTriedResult(job, suggestion, results);
  if (suggestion && triedResult) {
    const text = warning.replace(SUGGESTION_PATTERN, "");
    return element(
      "li",
      { class: "warning" },
      element("p", {}, formatMessage(`${text} ${describeTrial(job, suggestion, triedResult, results)}`)),
    );
  }
  return element(
    "li",
    { class: "warning" },
    element("p", {}, formatMessage(warning)),
    suggestion &&
      segmentWith &&
      button(describeSuggestion(suggestion), () => segmentWith({ [suggestion.parameter]: suggestion.value })),
  );
}

/** @param {Job} job @param {Job[]} results */
function hasUntriedSuggestion(job, results) {
  const suggestion = getSuggestion(job);
  return suggestion !== null && !findTriedResult(job, suggestion, results);
}

/** Advise to try the other models if no suggestion is left. @param {() => void} compareModels */
function createComparisonAdvice(compareModels) {
  return element(
    "li",
    { class: "advice" },
    element("p", {}, "Another model may find the objects. Try all models on a part of the stack."),
    button("Compare the models", compareModels, "secondary"),
  );
}

/** Describe the result of a suggestion that was tried. @param {Job} job @param {import("./advice.js").Suggestion} suggestion @param {Job} triedResult @param {Job[]} results */
function describeTrial(job, { parameter, value }, triedResult, results) {
  const confidence = formatConfidence(triedResult);
  const trial = `“${describeSetting(parameter, value)}” was tried${confidence && `: confidence ${confidence}`}.`;
  const count = countComparableResults(job, results);
  return findBetterResult(job, results) || count < 2
    ? trial
    : `${trial} No other of the ${count} results of this stack has a clearly higher confidence than this one.`;
}

/** @param {string[]} notes */
function createNoteList(notes) {
  return element("ul", { class: "notes" }, ...notes.map((note) => element("li", {}, formatMessage(note))));
}
