/** List of the projects on the start screen. */

import { button, element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { openNewProjectDialog } from "./project_dialogs.js";
import { fetchProjects } from "./project_requests.js";

/** Create the list. @returns {Promise<HTMLElement>} */
export async function createProjectList() {
  const projects = await fetchProjects();
  return element(
    "section",
    { class: "recent projects", "aria-labelledby": "projects-title" },
    element(
      "div",
      { class: "row between" },
      element("h2", { id: "projects-title" }, "Projects on the server"),
      button("New project", openNewProjectDialog, "secondary"),
    ),
    projects.length > 0
      ? element("ul", {}, ...projects.map(createItem))
      : element(
          "p",
          { class: "muted" },
          "A project keeps the results, corrections and models of an experiment, with one table, plots and one archive.",
        ),
  );
}

/** @param {import("./project_requests.js").ProjectSummary} project */
function createItem({ id, name, members, changed }) {
  const counts = [
    formatCount(members.job ?? 0, "result"),
    members.annotation ? formatCount(members.annotation, "annotated stack") : "",
    members.model ? formatCount(members.model, "model") : "",
  ];
  return element(
    "li",
    {},
    element(
      "a",
      { class: "recent-job", href: `#project=${id}` },
      element(
        "span",
        { class: "recent-text" },
        element("strong", {}, name),
        element("span", { class: "muted" }, counts.filter(Boolean).join(" · ")),
        element("span", { class: "muted" }, `changed ${formatAge(changed)}`),
      ),
    ),
  );
}
