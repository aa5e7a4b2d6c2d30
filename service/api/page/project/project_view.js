/** View of a project: notes, plots, and a table of its members with their groups. */

import { connection } from "../core/connection.js";
import { button, downloadBlob, element, redraw, setTitle } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { formatCount, formatDate, formatNumber } from "../core/format.js";
import { hasKey, request, requestJson } from "../core/requests.js";
import { PlotsView } from "./plots_view.js";
import { openAddMembersDialog } from "./project_dialogs.js";
import { changeProject, listGroups, MAX_GROUP_LENGTH, MAX_NAME_LENGTH } from "./project_requests.js";
import { summarize } from "./statistics.js";

/** @typedef {import("./project_requests.js").Project} Project */
/** @typedef {import("./project_requests.js").Member} Member */
/** @typedef {import("./project_requests.js").ProjectChanges} ProjectChanges */

const KIND_TITLES = { job: "Results", annotation: "Annotated stacks", model: "Models" };
const COLUMN_TITLES = ["", "Stack", "Group", "Objects", "Median volume", "Median intensity", "Confidence", "Model"];

/** View of a project. Each change is sent to the service immediately. */
class ProjectView {
  /** @param {HTMLElement} root @param {Project} project @param {boolean} isTemporary whether the service deletes projects when it stops @param {AbortSignal} signal aborted when another view opens */
  constructor(root, project, isTemporary, signal) {
    this.project = project;
    this.signal = signal;
    /** Members that are selected for a change, by key. @type {Set<string>} */
    this.selected = new Set();
    this.nameInput = this.#createNameInput();
    this.notesInput = element("textarea", {
      rows: 2,
      maxLength: 10_000,
      value: project.notes,
      placeholder: "Notes, such as the conditions of the experiment",
      "aria-label": "Notes",
      onchange: () => this.#change({ notes: this.notesInput.value }),
    });
    this.statusText = element("p", { class: "muted small", role: "status" });
    this.plots = new PlotsView(project.id);
    this.plots.addEventListener("load", () => this.#drawMembers());
    this.bar = element("div", { class: "row selection-bar", hidden: true });
    this.table = element("div", { class: "table-scroller", tabIndex: 0, role: "region", "aria-label": "Members" });
    root.replaceChildren(
      element(
        "section",
        { class: "card project-head", "aria-label": "Project" },
        element("div", { class: "row between" }, this.nameInput, this.#createButtons()),
        this.notesInput,
        isTemporary &&
          element("p", { class: "warning-text" }, "The service deletes projects and their results when it stops."),
        this.statusText,
      ),
      this.plots.root,
      element(
        "section",
        { class: "card project-members", "aria-label": "Members of the project" },
        this.bar,
        this.table,
      ),
    );
    this.show(project);
  }

  #createNameInput() {
    const input = element("input", {
      type: "text",
      class: "project-name",
      value: this.project.name,
      maxLength: MAX_NAME_LENGTH,
      "aria-label": "Name of the project",
      onchange: async () => {
        await this.#change({ name: input.value });
        input.value = this.project.name;
      },
    });
    return input;
  }

  #createButtons() {
    const { id } = this.project;
    const download = (/** @type {string} */ part, /** @type {string} */ suffix) =>
      this.#report(() => saveFile(`projects/${id}/${part}`, `${this.project.name}${suffix}`));
    this.downloadButtons = [
      button("Archive (ZIP)", () => download("archive", ".zip"), "secondary"),
      button("Table (CSV)", () => download("table", "_objects.csv"), "secondary"),
    ];
    const add = () => this.#report(() => openAddMembersDialog(this.project, (project) => this.show(project)));
    return element(
      "div",
      { class: "row" },
      button("Add results", add, "primary"),
      ...this.downloadButtons,
      button("Delete the project", () => this.#report(() => this.#delete()), "link"),
    );
  }

  /** Run an action, and show its error. @param {() => Promise<unknown>} action */
  async #report(action) {
    try {
      await action();
    } catch (error) {
      showError(error);
    }
  }

  /** @param {ProjectChanges} changes */
  #change(changes) {
    return this.#report(async () => {
      this.show(await changeProject(this.project.id, changes));
      this.statusText.textContent = "Saved on the server.";
    });
  }

  async #delete() {
    if (!confirm(describeDeletion(this.project))) return;
    await request(`projects/${this.project.id}`, { method: "DELETE" });
    location.hash = "";
  }

  /** @param {Project} project */
  show(project) {
    if (this.signal.aborted) return;
    this.project = project;
    setTitle(project.name);
    const keys = new Set(project.members.map(getKey));
    for (const key of this.selected) if (!keys.has(key)) this.selected.delete(key);
    this.#drawMembers();
    this.plots.show(project.members).catch(showError);
  }

  #drawMembers() {
    this.#drawBar();
    redraw(this.table, () => this.#createTable());
  }

  #listSelected() {
    return this.project.members.filter((member) => this.selected.has(getKey(member)));
  }

  /** Draw the controls that change all selected members. */
  #drawBar() {
    const members = this.#listSelected();
    this.bar.hidden = members.length === 0;
    const input = element("input", {
      type: "text",
      id: "selection-group",
      maxLength: MAX_GROUP_LENGTH,
      placeholder: "such as control",
      "aria-label": "Group of the selected members",
    });
    input.setAttribute("list", "group-names");
    const setGroup = () => this.#change({ add: members.map((member) => withGroup(member, input.value)) });
    const remove = () => this.#change({ remove: members.map(({ kind, id }) => ({ kind, id })) });
    redraw(this.bar, () => [
      element("span", {}, `${members.length} selected`),
      input,
      button("Set the group", setGroup, "secondary"),
      button("Remove from the project", remove, "secondary"),
    ]);
  }

  #createTable() {
    const { members } = this.project;
    if (members.length === 0)
      return [
        element(
          "p",
          { class: "muted" },
          "This project is empty. Press “Add results”, or open a result or a batch and press “Add to a project”.",
        ),
      ];
    const allCheckbox = element("input", {
      type: "checkbox",
      "aria-label": "Select all members",
      checked: this.selected.size === members.length,
      onchange: () => this.#select(members, allCheckbox.checked),
    });
    const headers = COLUMN_TITLES.map((title) => element("th", { scope: "col" }, title || allCheckbox));
    const kinds = /** @type {(keyof typeof KIND_TITLES)[]} */ (Object.keys(KIND_TITLES));
    const names = listGroups(members).map((name) => element("option", { value: name }));
    return [
      element("datalist", { id: "group-names" }, ...names),
      element(
        "table",
        { class: "status-table project-table" },
        element("thead", {}, element("tr", {}, ...headers)),
        ...kinds.map((kind) => this.#createBody(kind)),
      ),
    ];
  }

  /** @param {Member[]} members @param {boolean} isSelected */
  #select(members, isSelected) {
    for (const member of members) {
      if (isSelected) this.selected.add(getKey(member));
      else this.selected.delete(getKey(member));
    }
    this.#drawMembers();
  }

  /** @param {keyof typeof KIND_TITLES} kind */
  #createBody(kind) {
    const members = this.project.members.filter((member) => member.kind === kind);
    if (members.length === 0) return null;
    const title = `${KIND_TITLES[kind]} (${members.length})`;
    const header = element("th", { scope: "rowgroup", colSpan: COLUMN_TITLES.length }, title);
    return element("tbody", {}, element("tr", {}, header), ...members.map((member) => this.#createRow(member)));
  }

  /** @param {Member} member */
  #createRow(member) {
    const checkbox = element("input", {
      type: "checkbox",
      "aria-label": `Select ${member.name}`,
      checked: this.selected.has(getKey(member)),
      onchange: () => this.#select([member], checkbox.checked),
    });
    const groupInput = element("input", {
      type: "text",
      value: member.group,
      maxLength: MAX_GROUP_LENGTH,
      "aria-label": `Group of ${member.name}`,
      onchange: () => this.#change({ add: [withGroup(member, groupInput.value)] }),
    });
    groupInput.setAttribute("list", "group-names");
    const cells = [checkbox, createNameCell(member), groupInput].map((cell) => element("td", {}, cell));
    if (member.available) cells.push(...this.#describe(member).map((text) => element("td", {}, text)));
    else cells.push(element("td", { colSpan: COLUMN_TITLES.length - cells.length }, "no longer on the server"));
    return element("tr", { class: member.available ? "" : "missing" }, ...cells);
  }

  /** @param {Member} member @returns {string[]} the other cells of the row of a member */
  #describe(member) {
    const objects = member.kind === "job" ? this.plots.objects?.get(member.id) : undefined;
    const unit = objects?.unit === "um" ? "µm³" : "voxels";
    const [volume, intensity] = [objects?.volumes, objects?.intensities].map(
      (values) => summarize(values ?? [])?.median,
    );
    return [
      member.objects === null ? "" : formatNumber(member.objects),
      volume === undefined ? "" : `${formatNumber(volume)} ${unit}`,
      intensity === undefined ? "" : formatNumber(intensity),
      member.confidence === null ? "" : `${Math.round(100 * member.confidence)}%`,
      member.model ?? "",
    ];
  }
}

/** @param {Member} member */
function getKey({ kind, id }) {
  return `${kind} ${id}`;
}

/** @param {Member} member @param {string} group */
function withGroup({ kind, id, name }, group) {
  return { kind, id, name, group };
}

/** @param {Member} member @returns {Node | string} */
function createNameCell({ kind, id, name, available }) {
  return kind === "job" && available ? element("a", { href: `#job=${id}` }, name) : name;
}

/** Describe the effect of deleting a project on its members. @param {Project} project */
function describeDeletion({ name, members }) {
  const results = members.filter(({ kind, available }) => kind === "job" && available);
  const expired = results.filter(({ expires }) => Date.parse(expires ?? "") <= Date.now());
  const expirations = results
    .filter((member) => !expired.includes(member))
    .map(({ expires }) => expires ?? "")
    .sort();
  const sentences = [
    `Delete the project ${name}?`,
    expired.length > 0 &&
      `${formatCount(expired.length, "result")} will be deleted now, unless in another project, because the time for which results are stored has passed.`,
    expirations.length > 0 &&
      `${formatCount(expirations.length, "result")} will be deleted later, the first on ${formatDate(expirations[0])}.`,
    "Annotated stacks and models are not deleted. Download the archive first if you need the results.",
  ];
  return sentences.filter(Boolean).join(" ");
}

/** Save a file of the service. Without an API key, the browser writes it to disk while it is received. @param {string} path @param {string} name */
async function saveFile(path, name) {
  if (hasKey()) downloadBlob(await (await request(path)).blob(), name);
  else element("a", { href: path, download: name }).click();
}

/** Show a project, and load it again after the connection to the service was lost. @param {HTMLElement} root @param {string} id @param {boolean} isTemporary @param {AbortSignal} signal aborted when another view opens */
export async function showProject(root, id, isTemporary, signal) {
  const view = new ProjectView(root, await requestJson(`projects/${id}`, { signal }), isTemporary, signal);
  connection.subscribe(() => {
    if (connection.state.lostAt === null)
      requestJson(`projects/${id}`).then((project) => view.show(project), showError);
  }, signal);
}
