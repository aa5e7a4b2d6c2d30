/** Requests for projects, which the service stores for the user's API key. */

import { requestJson } from "../core/requests.js";

/** @typedef {import("openapi").ProjectReport} Project */
/** @typedef {import("openapi").ProjectSummary} ProjectSummary */
/** @typedef {import("openapi").MemberReport} Member */
/** @typedef {{kind: Member["kind"], id: string, name?: string, group?: string}} NewMember */
/** @typedef {{name?: string, notes?: string, add?: NewMember[], remove?: NewMember[]}} ProjectChanges */

export const MAX_NAME_LENGTH = 100;
export const MAX_GROUP_LENGTH = 64;
/** Longer names of stacks lose their beginning. */
export const MAX_STACK_NAME_LENGTH = 200;
const HEADERS = { "Content-Type": "application/json" };

/** @returns {Promise<ProjectSummary[]>} the project that was changed last first */
export async function fetchProjects() {
  return (await requestJson("projects")).projects;
}

/** @param {ProjectChanges} content @returns {Promise<Project>} */
export function createProject(content) {
  return requestJson("projects", { method: "POST", headers: HEADERS, body: JSON.stringify(content) });
}

/** @param {string} id @param {ProjectChanges} changes @returns {Promise<Project>} the project after the changes */
export function changeProject(id, changes) {
  return requestJson(`projects/${id}`, { method: "PATCH", headers: HEADERS, body: JSON.stringify(changes) });
}

/** @param {Member[]} members @returns {string[]} the groups of the members, in the order of their first member */
export function listGroups(members) {
  return [...new Set(members.map(({ group }) => group))].filter((group) => group !== "");
}
