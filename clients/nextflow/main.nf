// Segments every stack that matches --input, and writes labels and tables to --outdir.

include { STACKSEG_SEGMENT } from './modules/stackseg/segment/main'

workflow {
    // Results with the same name would replace each other.
    def names = new HashSet()
    stacks = Channel
        .fromPath(params.input, type: 'any', checkIfExists: true)
        .map { stack ->
            if (!names.add(stack.name)) error("Several stacks have the name ${stack.name}. Rename them.")
            [ [id: stack.name, model: params.model, channel: params.channel,
               voxel_size: params.voxel_size, diameter: params.diameter], stack ]
        }
    STACKSEG_SEGMENT(stacks)
}
