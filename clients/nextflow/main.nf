// Segments every stack that matches --input, and writes labels and tables to --outdir.

include { STACKSEG_SEGMENT } from './modules/stackseg/segment/main'

workflow {
    stacks = Channel
        .fromPath(params.input, type: 'any', checkIfExists: true)
        .map { stack -> [ [id: stack.simpleName, model: params.model, channel: params.channel,
                           voxel_size: params.voxel_size, diameter: params.diameter], stack ] }
    STACKSEG_SEGMENT(stacks)
}
