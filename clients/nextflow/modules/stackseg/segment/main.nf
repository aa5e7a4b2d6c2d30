process STACKSEG_SEGMENT {
    tag "$meta.id"
    label 'process_medium'

    container "stackseg:0.1.0-workflows"

    input:
    tuple val(meta), path(stack)

    output:
    tuple val(meta), path("*_labels.ome.tif"), emit: labels
    tuple val(meta), path("*_objects.csv")   , emit: table
    path "versions.yml"                      , emit: versions

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    def prefix = task.ext.prefix ?: "${meta.id}"
    def model = meta.model ? "--model '${meta.model}'" : ''
    def channel = meta.channel != null ? "--channel '${meta.channel}'" : ''
    def voxel_size = meta.voxel_size ? "--voxel-size '${meta.voxel_size}'" : ''
    def diameter = meta.diameter ? "--diameter '${meta.diameter}'" : ''
    """
    export STACKSEG_ENGINE__CACHE_FOLDER="\$PWD/engine-cache"
    export STACKSEG_DEVICE__THREADS=${task.cpus}

    stackseg segment \\
        $model \\
        $channel \\
        $voxel_size \\
        $diameter \\
        $args \\
        --measurements "${prefix}_objects.csv" \\
        -- $stack "${prefix}_labels.ome.tif"

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        stackseg: \$(stackseg --version)
    END_VERSIONS
    """

    stub:
    def prefix = task.ext.prefix ?: "${meta.id}"
    """
    touch "${prefix}_labels.ome.tif" "${prefix}_objects.csv"

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        stackseg: \$(stackseg --version)
    END_VERSIONS
    """
}
