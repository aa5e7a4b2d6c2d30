/** Dialogs that create a project, add displayed results to a project, and add any results to the displayed project. */

import { button, element, field, formatMessage, openDialog } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { requestJson } from "../core/requests.js";
import { describeAnnotation, fetchAnnotations } from "../training/annotation_list.js";
import { countAllCorrections } from "../volumes/correction_store.js";
import {
  changeProject,
  createProject,
  fetchProjects,
  listGroups,
  MAX_GROUP_LENGTH,
  MAX_NAME_LENGTH,
  MAX_STACK_NAME_LENGTH,
} from "./project_requests.js";

/** @typedef {import("./project_requests.js").Project} Project */
/** @typedef {import("./project_requests.js").NewMember} NewMember */

const NEW_PROJECT = "";
const MAX_LISTED_JOBS = 1000;

/**
 * Open a dialog with a form.
 * @param {string} title @param {string} submitText @param {(HTMLElement | false)[]} content @param {() => Promise<boolean | undefined>} submit returns false to keep the dialog open
 */
function openForm(title, submitText, content, submit) {
  const problemText = element("p", { class: "warning-text", role: "alert" });
  const submitButton = element("button", { type: "submit", class: "primary" }, submitText);
  const onsubmit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    submitButton.disabled = true;
    try {
      if ((await submit()) !== false) dialog.close();
    } catch (error) {
      problemText.replaceChildren(formatMessage(error));
    }
    submitButton.disabled = false;
  };
  const cancelButton = button("Cancel", () => dialog.close(), "secondary");
  const buttons = element("div", { class: "row end" }, cancelButton, submitButton);
  const dialog = openDialog(
    title,
    element("form", { class: "dialog-form", onsubmit }, ...content, problemText, buttons),
  );
}

/** @param {string} [value] */
function createNameInput(value = "") {
  return element("input", { type: "text", value, required: true, maxLength: MAX_NAME_LENGTH, autocomplete: "off" });
}

/** Create a field for a group that suggests existing groups. @param {string[]} groups */
function createGroupField(groups) {
  const suggestions = element("datalist", { id: "group-suggestions" });
  const suggest = (/** @type {string[]} */ names) =>
    suggestions.replaceChildren(...names.map((name) => element("option", { value: name })));
  const attributes = { type: "text", maxLength: MAX_GROUP_LENGTH, autocomplete: "off", placeholder: "such as control" };
  const input = element("input", attributes);
  input.setAttribute("list", suggestions.id);
  suggest(groups);
  return { input, suggest, root: element("div", {}, field("Group (optional)", input), suggestions) };
}

/** Ask for the name of a new project, and open it. */
export function openNewProjectDialog() {
  const nameInput = createNameInput();
  openForm("New project", "Create", [field("Name", nameInput)], async () => {
    location.hash = `project=${(await createProject({ name: nameInput.value })).id}`;
    return true;
  });
}

/** Ask for a project, and add results with their annotated stacks. @param {{id: string, name: string}[]} results job ids, and names of their stacks */
export async function openAddToProjectDialog(results) {
  const [projects, annotations] = await Promise.all([fetchProjects(), fetchAnnotations().catch(() => [])]);
  const jobs = new Set(results.map(({ id }) => id));
  const corrected = annotations.filter(({ job }) => job !== null && jobs.has(job));
  const nameInput = createNameInput();
  const nameField = field("Name of the new project", nameInput);
  const group = createGroupField([]);
  /** Members of the selected project. @type {Project["members"]} */
  let members = [];
  const onchange = async () => {
    const isNew = select.value === NEW_PROJECT;
    nameField.hidden = !isNew;
    nameInput.disabled = !isNew;
    members = isNew ? [] : (await requestJson(`projects/${select.value}`)).members;
    group.suggest(listGroups(members));
  };
  const select = element(
    "select",
    { onchange },
    ...projects.map(({ id, name }) => element("option", { value: id }, name)),
    element("option", { value: NEW_PROJECT }, "New project"),
  );
  await onchange();
  const correctedCheckbox = element("input", { type: "checkbox", checked: true });
  const content = [
    field("Project", select),
    nameField,
    group.root,
    corrected.length > 0 &&
      element(
        "label",
        { class: "inline-label" },
        correctedCheckbox,
        `Also add ${formatCount(corrected.length, "annotated stack")} with corrections of these results`,
      ),
    await createCorrectionNote(jobs, new Set(corrected.map(({ job }) => job))),
  ];
  const title =
    results.length === 1 ? `Add ${results[0].name} to a project` : `Add ${results.length} results to a project`;
  openForm(title, "Add", content, async () => {
    // Without a new group, members of the project keep their group.
    const getGroup = (/** @type {string} */ id) =>
      group.input.value || (members.find((member) => member.id === id)?.group ?? "");
    /** @type {NewMember[]} */
    const add = results.map(({ id, name }) => ({
      kind: "job",
      id,
      name: name.slice(-MAX_STACK_NAME_LENGTH),
      group: getGroup(id),
    }));
    if (correctedCheckbox.checked)
      for (const { id } of corrected) add.push({ kind: "annotation", id, group: getGroup(id) });
    const project =
      select.value === NEW_PROJECT
        ? await createProject({ name: nameInput.value, add })
        : await changeProject(select.value, { add });
    location.hash = `project=${project.id}`;
    return true;
  });
}

/** Create a note about corrections that are stored only in this browser. @param {Set<string>} jobs @param {Set<string | null>} savedJobs jobs whose corrections are saved as annotated stacks @returns {Promise<HTMLElement | false>} */
async function createCorrectionNote(jobs, savedJobs) {
  const correctedJobs = [...(await countAllCorrections()).keys()].map((key) => key.split("@")[0]);
  const unsaved = new Set(correctedJobs.filter((job) => jobs.has(job) && !savedJobs.has(job)));
  if (unsaved.size === 0) return false;
  const subject =
    unsaved.size === 1 ? "The corrections of 1 result are" : `The corrections of ${unsaved.size} results are`;
  const text = `${subject} stored only in this browser. To add them, save the corrected labels as an annotated stack first.`;
  return element("p", { class: "muted small" }, text);
}

/** Let the user select results, annotated stacks and models, and add them to a project. @param {Project} project @param {(project: Project) => void} onchange called with the changed project */
export async function openAddMembersDialog(project, onchange) {
  const [{ jobs }, annotations, { models }] = await Promise.all([
    requestJson(`jobs?limit=${MAX_LISTED_JOBS}`),
    fetchAnnotations().catch(() => []),
    requestJson("models"),
  ]);
  const isNew = (/** @type {NewMember} */ { kind, id }) =>
    !project.members.some((member) => member.kind === kind && member.id === id);
  /** @type {import("openapi").JobReport[]} */
  const results = jobs.filter((/** @type {import("openapi").JobReport} */ { result }) => result !== null);
  /** @type {{member: NewMember, text: string, detail: string}[][]} */
  const lists = [
    results.map(({ id, name, model, objects, created }) => ({
      member: { kind: "job", id },
      text: name,
      detail: [objects === null ? "" : formatCount(objects, "object"), model, formatAge(created)]
        .filter(Boolean)
        .join(" · "),
    })),
    annotations.map((annotation) => ({
      member: { kind: "annotation", id: annotation.id },
      text: annotation.name,
      detail: describeAnnotation(annotation),
    })),
    /** @type {import("openapi").ModelInfo[]} */ (models).map(({ name, summary }) => ({
      member: { kind: "model", id: name },
      text: name,
      detail: summary ?? "",
    })),
  ];
  const choices = lists.map((list) =>
    list
      .filter(({ member }) => isNew(member))
      .map((entry) => ({ ...entry, checkbox: element("input", { type: "checkbox" }) })),
  );
  const group = createGroupField(listGroups(project.members));
  const content = ["Results", "Annotated stacks", "Models"].map((title, index) => createChoices(title, choices[index]));
  if (choices.flat().length === 0)
    content.push(
      element("p", { class: "muted" }, "All results, annotated stacks and models are in this project already."),
    );
  openForm(`Add to ${project.name}`, "Add", [...content, group.root], async () => {
    const add = choices
      .flat()
      .filter(({ checkbox }) => checkbox.checked)
      .map(({ member }) => ({ ...member, group: group.input.value }));
    if (add.length === 0) throw new Error("Select at least one entry.");
    onchange(await changeProject(project.id, { add }));
    return true;
  });
}

/** @param {string} title @param {{text: string, detail: string, checkbox: HTMLInputElement}[]} choices @returns {HTMLElement | false} */
function createChoices(title, choices) {
  if (choices.length === 0) return false;
  const labels = choices.map(({ text, detail, checkbox }) =>
    element(
      "label",
      { class: "choice" },
      checkbox,
      element("span", {}, text),
      element("span", { class: "muted small" }, detail),
    ),
  );
  return element("fieldset", { class: "field choices" }, element("legend", { class: "field-name" }, title), ...labels);
}
