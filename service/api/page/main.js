/** Entry point of the web UI. It opens the view, stack or job that the URL fragment selects. */

import { createBatchList } from "./batch/batch_list.js";
import { listDone } from "./batch/batch_results.js";
import { findBatch } from "./batch/batch_store.js";
import { BatchView } from "./batch/batch_view.js";
import { acceptDrops } from "./batch/collect_files.js";
import { showFolderForm } from "./batch/folder_form.js";
import { isFolderJob, showFolderJob } from "./batch/folder_job.js";
import { createBatch, openBatch } from "./batch/open_batches.js";
import { setUpKeyDialog, updateKeyButton } from "./core/api_key.js";
import { checkConnection, watchConnection } from "./core/connection.js";
import { byId, element, setTitle } from "./core/elements.js";
import { hideError, showError } from "./core/error_bar.js";
import { wasConnectionLost } from "./core/job_requests.js";
import { Problem, request, requestJson, uploadStack } from "./core/requests.js";
import { setUpTheme } from "./core/theme.js";
import { createDraftList } from "./correct/draft_list.js";
import { EmptyLabels, SELECTION_NAMES } from "./correct/label_sources.js";
import { offerCorrections } from "./correct/orphaned_edits.js";
import { reopenAnnotation } from "./correct/reopen_annotation.js";
import { openGallery } from "./gallery/gallery.js";
import { offerProject } from "./project/offer.js";
import { createProjectList } from "./project/project_list.js";
import { showProject } from "./project/project_view.js";
import { showComparison } from "./result/compare_view.js";
import { createChecklist } from "./stack/guidance.js";
import { forgetJob, loadRecentJobs, markMissingJob, rememberJob } from "./stack/recent_jobs.js";
import { Session } from "./stack/session.js";
import { drawStartView } from "./stack/start_view.js";
import { uploadWithProgress } from "./stack/upload_view.js";
import { watchStatus } from "./status/status_view.js";
import { createAnnotationsList } from "./training/annotation_list.js";
import { openTrainingDialog } from "./training/training_dialog.js";
import { createTrainingRunsList, watchTraining } from "./training/training_view.js";
import { forgetCorrections, loadDescriptions } from "./volumes/correction_store.js";

/** @typedef {import("openapi").JobReport} Job */

/** The models, parameters and capabilities of the service. @type {import("./stack/session.js").Service} */
const service = {
  models: [],
  defaultModel: null,
  parameterNames: new Set(),
  capabilities: {
    corrections: false,
    annotations_bytes: 0,
    training: false,
    training_problem: null,
    training_minutes: 0,
    temporary_jobs: false,
    inputs: [],
    outputs: [],
  },
};
/** @type {Session | null} */
let session = null;

/** Whether no view was shown yet. A screen reader then reads the page from its beginning. */
let isFirstView = true;

/** Show one view and hide the others. @param {"start" | "work" | "status" | "training" | "compare" | "batch" | "project"} id @param {string} title */
function showView(id, title) {
  for (const view of ["start", "work", "status", "training", "compare", "batch", "project"])
    byId(view).hidden = view !== id;
  byId("new-stack").hidden = id === "start";
  byId("to-batch").hidden = true;
  offerProject(null);
  setTitle(title);
  focusTitle();
  document.body.classList.remove("busy");
  hideError();
}

/** Move the focus to the title of the view if the control that had the focus is gone, so that a screen reader announces the view. */
function focusTitle() {
  const { activeElement } = document;
  if (isFirstView) isFirstView = false;
  else if (activeElement === document.body || !activeElement?.checkVisibility()) byId("title").focus();
}

/** Upload a file and open its stack. @param {Blob} file @param {string} name */
async function openFile(file, name) {
  hideError();
  try {
    const stack = await uploadWithProgress(byId("start"), file, name);
    location.hash = `stack=${stack.id}`;
  } catch (error) {
    showStartView();
    showError(error);
  }
}

/** Open a stack, or a batch of several files or of a folder. @param {import("./batch/collect_files.js").Selection} selection */
async function openFiles({ files, isFolder, list }) {
  if (files.length === 1 && !isFolder) return openFile(files[0], files[0].name);
  try {
    const found = await list();
    if (found.length > 0) location.hash = `batch=${createBatch(found, service.defaultModel ?? "").id}`;
  } catch (error) {
    showError(error);
  }
}

async function openSample() {
  try {
    const sample = await request(`models/${service.defaultModel}/sample`);
    await openFile(await sample.blob(), `${service.defaultModel}-sample.tif`);
  } catch (error) {
    showError(error);
  }
}

function showStartView() {
  showView("start", "Objects in 3D microscopy stacks");
  const { inputs, outputs } = service.capabilities;
  const slots = drawStartView(byId("start"), {
    redraw: showStartView,
    openFiles,
    openSample,
    openJob: (id) => (location.hash = `job=${id}`),
    samplePicture: service.models.find(({ name }) => name === service.defaultModel)?.picture ?? null,
    openServerFolder: inputs.length && outputs.length ? () => (location.hash = "folder=new") : null,
  });
  fillSlot(slots.batches, [createBatchList(showStartView)]);
  fillSlot(slots.drafts, [createDraftList(showStartView)]);
  if (service.capabilities.corrections) fillSlot(slots.training, createTrainingLists());
  fillSlot(slots.projects, [createProjectList()]);
}

/** Show lists in their place on the start screen. @param {HTMLElement} slot @param {(Promise<HTMLElement | null> | null)[]} lists null for empty lists */
async function fillSlot(slot, lists) {
  try {
    slot.replaceChildren(...(await Promise.all(lists)).filter((list) => list !== null));
  } catch (error) {
    showError(error);
  }
}

/** Create the lists of the annotated stacks and of the training runs. */
function createTrainingLists() {
  const { training: canTrain, training_minutes: maxMinutes } = service.capabilities;
  const openDialogForTraining = canTrain ? () => openTrainingDialog(maxMinutes).catch(showError) : null;
  return [createAnnotationsList(openDialogForTraining), canTrain ? createTrainingRunsList() : null];
}

/** Create a session for a stack, and show its views. @param {import("./stack/session.js").Stack} stack */
function openSession(stack) {
  const name = stack.name || "stack.tif";
  // The view has to be visible before the session is created, because the canvases of the session read their size from
  // the layout.
  showView("work", name);
  return new Session({ ...stack, name }, service, showError);
}

/** @param {string} id @param {Record<string, string>} parameters settings of the segmentation */
async function openStack(id, parameters) {
  const stack = await requestJson(`stacks/${id}`);
  session = openSession({ id, name: stack.name, bytes: stack.bytes });
  showBatchLink(id, "").catch(showError);
  session.settings.restore({ ...session.settings.parameters, ...parameters });
  byId("side").replaceChildren(createChecklist());
  await session.inspect();
}

/** Open a stack, and annotate it from nothing. @param {string} id of the stack @param {Record<string, string>} parameters settings of the segmentation */
async function openAnnotationDraft(id, parameters) {
  await openStack(id, parameters);
  await session?.annotate();
}

/** Continue the annotation of an annotated stack. @param {string} id @param {AbortSignal} signal */
async function openAnnotatedStack(id, signal) {
  showView("start", "Annotated stack");
  byId("start").replaceChildren(element("p", { class: "muted", role: "status" }, "Loading the annotated stack"));
  const upload = (/** @type {Blob} */ file, /** @type {string} */ name) =>
    uploadWithProgress(byId("start"), file, name);
  try {
    const fragment = await reopenAnnotation(id, upload, service.defaultModel ?? "", signal);
    if (!signal.aborted) location.replace(`#${fragment}`);
  } catch (error) {
    if (signal.aborted) return;
    history.replaceState(null, "", "#");
    showStartView();
    throw error;
  }
}

/** Open a job, and show its stack if the service still stores the stack. @param {string} id */
async function openJob(id) {
  /** @type {Job} */
  const job = await requestJson(`jobs/${id}`);
  if (isFolderJob(job)) return location.replace(`#folder=${id}`);
  const { stack: stackId, measurements: _, ...parameters } = job.parameters;
  const stack = typeof stackId === "string" ? await requestJson(`stacks/${stackId}`).catch(() => null) : null;
  if (session === null || stack === null || session.stackId !== stack.id) {
    session?.end();
    session = openSession({ id: stack?.id ?? "", name: job.name, bytes: stack?.bytes ?? 0 });
  } else showView("work", session.name);
  const openedSession = session;
  showBatchLink(openedSession.stackId, id).catch(showError);
  const parameterStrings = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  openedSession.settings.restore({ ...parameterStrings, model: String(parameters.model ?? job.model.split("/")[0]) });
  rememberJob({ job: id, stack: openedSession.stackId, name: job.name, model: job.model, created: job.created });
  const inspection = stack ? openedSession.inspect() : Promise.resolve(openedSession.settings.showMissingStack());
  offerProject(() => [{ id, name: job.name }]);
  await Promise.all([inspection, openedSession.followJob(id)]);
}

/** @param {string} id @param {AbortSignal} signal */
async function openBatchView(id, signal) {
  const batch = await openBatch(id);
  if (batch === null) {
    history.replaceState(null, "", "#");
    showStartView();
    throw new Error("This browser does not store this batch. Open the batch in the browser in which you created it.");
  }
  showView("batch", batch.name);
  acceptDrops(byId("batch"), ({ list }) => list().then((found) => batch.addFiles(found), showError));
  // The controls of an earlier stack have the same ids as those of the settings of a file.
  byId("settings").replaceChildren();
  const openEntry = (/** @type {import("./batch/entries.js").Entry} */ { job, stack, report }) =>
    (location.hash = report?.state === "done" ? `job=${job}` : `stack=${stack}`);
  new BatchView(byId("batch"), batch, service, openEntry, signal);
  offerProject(() => listDone(batch).map(({ job, path }) => ({ id: job, name: path })));
}

/** Open a job on a folder on the host, or the form for a new one. @param {string} id "new" for the form @param {AbortSignal} signal */
async function openServerFolder(id, signal) {
  if (id === "new") {
    showView("batch", "Folder on the server");
    showFolderForm(byId("batch"), service, (job) => (location.hash = `folder=${job}`));
    return;
  }
  /** @type {Job} */
  const job = await requestJson(`jobs/${id}`);
  showView("batch", String(job.parameters.input));
  rememberJob({ job: id, name: String(job.parameters.input), model: job.model, created: job.created });
  showFolderJob(byId("batch"), id, signal);
}

/** Offer to go back to the batch of the displayed stack or job. @param {string} stack id @param {string} job id */
async function showBatchLink(stack, job) {
  const batch = await findBatch(stack, job);
  if (batch === undefined || byId("work").hidden) return;
  byId("to-batch").setAttribute("href", `#batch=${batch.id}`);
  byId("to-batch").hidden = false;
}

/** @param {string} id @param {AbortSignal} signal */
async function openTrainingRun(id, signal) {
  showView("training", "Model training");
  await watchTraining(byId("training"), id, signal, {
    openAnnotation: (annotation, model) => openAnnotation(annotation, model).catch(showError),
  });
}

/** Open the stack of an annotation, and select a model. If the stack has expired, upload the image of the annotation again. @param {string} id @param {string} model */
async function openAnnotation(id, model) {
  const { stack: stackId, name } = await requestJson(`annotations/${id}`);
  await loadModels();
  const storedStack = stackId ? await requestJson(`stacks/${stackId}`).catch(() => null) : null;
  const stack =
    storedStack ?? (await uploadStack(await (await request(`annotations/${id}/image`)).blob(), name, () => undefined));
  location.hash = `stack=${stack.id}&model=${encodeURIComponent(model)}`;
}

/** @param {AbortSignal} signal */
async function openStatus(signal) {
  showView("status", "Service status");
  await watchStatus(byId("status"), signal, loadModels);
}

/** @param {string} id @param {AbortSignal} signal */
async function openProject(id, signal) {
  byId("project").replaceChildren();
  showView("project", "Project");
  await showProject(byId("project"), id, service.capabilities.temporary_jobs, signal);
}

/** @param {string[]} jobs @param {AbortSignal} signal */
async function openComparison(jobs, signal) {
  showView("compare", "Compare two results");
  await showComparison(byId("compare"), jobs, signal);
}

async function loadModels() {
  const response = await requestJson("models");
  service.models = response.models;
  service.defaultModel = response.default;
}

/** Load the permissions of the caller, which can change if the service is restarted. */
async function loadCapabilities() {
  Object.assign(service.capabilities, await requestJson("limits"));
}

/** Cancels the requests of the current view when another view opens. */
let viewAbort = new AbortController();

/** Functions that open the view of a resource. @type {Record<string, (id: string, parameters: Record<string, string>, signal: AbortSignal) => unknown>} */
const VIEWS = {
  compare: (ids, _parameters, signal) => openComparison(ids.split(","), signal),
  batch: (id, _parameters, signal) => openBatchView(id, signal),
  folder: (id, _parameters, signal) => openServerFolder(id, signal),
  job: openJob,
  stack: openStack,
  project: (id, _parameters, signal) => openProject(id, signal),
  annotate: openAnnotationDraft,
  annotated: (id, _parameters, signal) => openAnnotatedStack(id, signal),
  training: (id, _parameters, signal) => openTrainingRun(id, signal),
};

const ID_PATTERN = /^[0-9a-f]{32}$/;
/** Ids in other links than those to one resource of the service. The ids of batches are created in the browser. @type {Record<string, RegExp>} */
const OTHER_ID_PATTERNS = { compare: /^[0-9a-f]{32},[0-9a-f]{32}$/, batch: /./, folder: /^(new|[0-9a-f]{32})$/ };

/** @param {string} kind @param {string} id @param {Record<string, string>} parameters settings of the segmentation @param {AbortSignal} signal */
async function openView(kind, id, parameters, signal) {
  if (kind === "status") return openStatus(signal);
  if (!Object.hasOwn(VIEWS, kind) || !id) return showStartView();
  // The check also prevents that a link with an id such as `x/../../models/NAME` leads to another resource.
  if (!(OTHER_ID_PATTERNS[kind] ?? ID_PATTERN).test(id))
    throw new Problem("not-found", "This link is incomplete or mistyped. Copy the whole link, and open it again.", 404);
  return VIEWS[kind](id, parameters, signal);
}

/** Open the view that the URL fragment selects. */
async function route() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const [kind, id] = fragment.entries().next().value ?? ["", ""];
  // A link must not set other parameters, which the settings do not show.
  const parameterNames = kind === "annotate" ? ["model", ...SELECTION_NAMES] : ["model"];
  const parameters = Object.fromEntries([...fragment].filter(([name]) => parameterNames.includes(name)));
  viewAbort.abort();
  viewAbort = new AbortController();
  const { signal } = viewAbort;
  acceptDrops(null, openFiles);
  document.body.classList.add("busy");
  if (kind !== "job") {
    session?.end();
    session = null;
  }
  try {
    await openView(kind, id, parameters, signal);
  } catch (error) {
    document.body.classList.remove("busy");
    if (error instanceof Problem && error.status === 404) {
      history.replaceState(null, "", "#");
      if (kind === "job") markMissingJob(id);
      showStartView();
      if (await offerSavedLabels(kind, id, parameters)) return;
    }
    showError(error);
    if (await wasConnectionLost(error, signal)) await route();
  }
}

/** Offer to export the labels that this browser saves for a missing job or stack. @param {string} kind @param {string} id @param {Record<string, string>} parameters @returns {Promise<boolean>} whether there are labels */
async function offerSavedLabels(kind, id, parameters) {
  if (kind === "annotate") return offerAnnotationOfMissingStack(id, parameters);
  return kind === "job" && offerCorrectionsOfMissingJob(id);
}

/** Mark a job that the service no longer stores, and offer to export its corrected labels. @param {string} id @returns {Promise<boolean>} whether the job has corrections */
async function offerCorrectionsOfMissingJob(id) {
  const name = loadRecentJobs().find(({ job }) => job === id)?.name ?? "stack.tif";
  const forgetJobAndCorrections = () => {
    forgetJob(id);
    forgetCorrections(id);
    showStartView();
  };
  return offerCorrections({ id, isEmpty: false }, name, forgetJobAndCorrections);
}

/** Offer to export the annotation of a stack that the service no longer stores. @param {string} stack id @param {Record<string, string>} parameters of the annotation @returns {Promise<boolean>} whether this browser stores the annotation */
async function offerAnnotationOfMissingStack(stack, parameters) {
  const { id } = new EmptyLabels(stack, parameters, "", null);
  const description = (await loadDescriptions()).find(([key]) => key === id)?.[1];
  return description !== undefined && offerCorrections({ id, isEmpty: true }, description.name, showStartView);
}

/** Load the models, parameters and capabilities of the service. @returns {Promise<boolean>} false if the service does not respond */
async function loadService() {
  try {
    const [openapi] = await Promise.all([requestJson("openapi.json"), loadModels()]);
    /** @type {{name: string}[]} */
    const parameters = openapi.paths["/jobs"].post.parameters;
    service.parameterNames = new Set(parameters.map(({ name }) => name));
    if (openapi.paths["/limits"]) await loadCapabilities();
    return true;
  } catch (error) {
    if (error instanceof Problem && error.status === 0) return false;
    throw error;
  }
}

async function start() {
  setUpTheme(byId("theme"));
  setUpKeyDialog(byId("key"));
  byId("new-stack").addEventListener("click", () => (location.hash = ""));
  byId("models").addEventListener("click", () => openGallery(service.models, byId("work").hidden ? null : session));
  watchConnection(() => loadCapabilities().catch(() => undefined));
  while (!(await loadService())) await checkConnection();
  updateKeyButton(byId("key"));
  // Do not listen earlier: if the fragment changed during startup, `route` would open the same view twice.
  window.addEventListener("hashchange", route);
  await route();
}

start().catch(showError);
