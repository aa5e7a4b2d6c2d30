/** Annotated stacks that the service stores, opened again to continue the annotation. */

import { Problem, request, requestJson, uploadStack } from "../core/requests.js";
import { decodeRegion, describeRegion } from "../volumes/annotated_region.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { countVoxels, fetchVolume } from "../volumes/planes.js";
import { explainSizeLimit } from "./full_resolution.js";
import { EmptyLabels } from "./label_sources.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("../volumes/planes.js").Volume} Volume */

/**
 * Prepare an annotated stack for editing. If it was saved from an annotation that is stored in this browser, that annotation
 * continues. Otherwise, its image becomes a new stack, and its labels become the first edit of an annotation of this stack.
 * @param {string} id of the annotated stack @param {(file: Blob, name: string) => Promise<import("openapi").StackReport>} upload uploads the image and shows the progress
 * @param {string} defaultModel name of the model to train if the labels were not computed by a model @param {AbortSignal} signal
 * @returns {Promise<string>} the URL fragment that opens the annotation
 */
export async function reopenAnnotation(id, upload, defaultModel, signal) {
  /** @type {Annotation} */
  const report = await requestJson(`annotations/${id}`, { signal });
  const draftFragment = await findDraft(id);
  if (draftFragment !== null) return draftFragment;
  const problem = explainSizeLimit({ fullShape: report.shape, data: new Uint32Array(0) });
  if (problem) throw new Error(problem);
  const labels = await fetchLabels(report, signal);
  const image = await (await request(`annotations/${id}/image`, { signal })).blob();
  const stack = await upload(image, report.name);
  const source = new EmptyLabels(stack.id, {}, report.base_model?.split("/")[0] ?? defaultModel, null);
  await storeDraft(source, report, labels);
  return source.getFragment();
}

/** Find the annotation in this browser from which an annotated stack was saved. @param {string} id of the annotated stack @returns {Promise<string | null>} its URL fragment, null if there is none or if the service no longer stores its stack */
async function findDraft(id) {
  for (const [key, { fragment }] of await correctionStore.loadDescriptions()) {
    if (!(await correctionStore.loadAnnotationIds(key)).includes(id)) continue;
    const stack = new URLSearchParams(fragment).get("annotate");
    const isStored = await requestJson(`stacks/${stack}`).then(
      () => true,
      (error) => {
        if (error instanceof Problem && error.status === 404) return false;
        throw error;
      },
    );
    if (isStored) return fragment;
  }
  return null;
}

/** Fetch the labels. The service sends planes only of stacks, so the file of the labels is stored as a stack in the meantime. @param {Annotation} report @param {AbortSignal} signal @returns {Promise<Volume>} */
async function fetchLabels({ id, name, shape }, signal) {
  const file = await (await request(`annotations/${id}/labels`, { signal })).blob();
  const { id: stack } = await uploadStack(file, `${name} labels.ome.tif`, () => undefined, signal);
  try {
    const source = { url: `stacks/${stack}/planes`, parameters: {}, fullShape: shape };
    return await fetchVolume(source, signal, () => undefined, [1, 1, 1]);
  } finally {
    await request(`stacks/${stack}`, { method: "DELETE" }).catch(() => undefined);
  }
}

/** Store an annotation in this browser whose first edit adds the labels. @param {EmptyLabels} source @param {Annotation} report @param {Volume} labels */
async function storeDraft(source, report, labels) {
  const { shape, voxel_size: size } = report;
  const data = new Uint16Array(countVoxels(shape));
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], fullShape: shape }, size ?? [1, 1, 1]);
  const region = decodeRegion(report, labels);
  const key = source.id;
  await correctionStore.saveCorrection(key, 0, editor.addLabels(labels.data, report.ignore_label ?? 0));
  await correctionStore.saveRegion(key, region);
  await correctionStore.addAnnotationId(key, report.id);
  await correctionStore.saveDescription(key, {
    name: report.name,
    fragment: source.getFragment(),
    objectCount: editor.objects.size,
    regionText: describeRegion(region),
    changed: new Date().toISOString(),
    shape,
    voxelSize: size && { z: size[0], y: size[1], x: size[2] },
  });
}
