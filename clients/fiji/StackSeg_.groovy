/*
 * StackSeg in Fiji: segment the current image or a folder of stacks, and save corrected labels as an annotated stack.
 *
 * Copy this file to the folder "plugins" of Fiji and restart Fiji. README.md describes the arguments for scripts.
 * Needs Java 8 or later, ImageJ 1.52 or later, and no other libraries. License: Apache-2.0.
 */

import groovy.transform.CompileStatic
import ij.IJ
import ij.ImagePlus
import ij.ImageStack
import ij.Prefs
import ij.WindowManager
import ij.gui.GenericDialog
import ij.io.FileSaver
import ij.io.Opener
import ij.measure.Calibration
import ij.measure.ResultsTable
import ij.plugin.CompositeConverter
import ij.process.ImageProcessor
import java.awt.GraphicsEnvironment
import java.math.MathContext
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.FileSystems
import javax.net.ssl.SSLHandshakeException

/** An error that is shown to the user. `status` is 0 if the service did not respond. */
class Problem extends RuntimeException {
    int status
    String parameter
    double retryAfter = 2

    Problem(String message, int status = 0) {
        super(message)
        this.status = status
    }
}

/** The user pressed Esc or canceled a dialog. */
class Canceled extends RuntimeException {}

/** Parser of JSON. Not every Fiji includes groovy.json. */
class Json {
    private static final TOKEN = ~/\s*([{}\[\]:,]|"(?:[^"\\]|\\.)*+"|[-+.\w]+)/
    private final Iterator<String> tokens

    private Json(String text) { tokens = (text =~ TOKEN).collect { it[1] }.iterator() }

    /** Parse a document. Raises Problem if it is not JSON. */
    static Object parse(String text) {
        try {
            def json = new Json(text)
            return json.value(json.tokens.next())
        } catch (NoSuchElementException | NumberFormatException ignored) {
            throw new Problem("This is not a response of StackSeg: ${text.take(200)}")
        }
    }

    private Object value(String token) {
        if (token == '{') return object()
        if (token == '[') return list()
        if (token.startsWith('"')) return unescape(token)
        if (token in ['true', 'false']) return token == 'true'
        return token == 'null' ? null : new BigDecimal(token)
    }

    private Map object() {
        def members = [:]
        for (String token = tokens.next(); token != '}'; token = tokens.next()) {
            if (token == ',') continue
            tokens.next()
            members[unescape(token)] = value(tokens.next())
        }
        return members
    }

    private List list() {
        def items = []
        for (String token = tokens.next(); token != ']'; token = tokens.next()) if (token != ',') items << value(token)
        return items
    }

    private static String unescape(String token) {
        def controls = [n: '\n', t: '\t', r: '\r', b: '\b', f: '\f']
        return token[1..<-1].replaceAll(/\\(?:u([0-9a-fA-F]{4})|(.))/) { all, code, letter ->
            code ? (char) Integer.parseInt(code, 16) : controls.get(letter, letter)
        }
    }
}

/** Messages of the service in the words of its web page: titles of settings, and lengths in x, y, z order. */
class Terms {
    static final TITLES = [model: 'Model', scene: 'Scene', channel: 'Channel to segment', time: 'Time points', axes: 'Axes',
        voxel_size: 'Voxel size', diameter: 'Object diameter', threshold: 'Foreground threshold',
        minimum_size: 'Minimum object size', min_confidence: 'Minimum confidence', border: 'Objects at the border',
        quality: 'Quality', link: 'Track objects over time']
    static final VALUES = ['diameter=none': 'original resolution', 'diameter=auto': 'estimated from the stack']

    static String describe(String text) {
        def settings = ~/\b(${TITLES.keySet().join('|')})=((?:[\w:-]|[.,](?=\w))*)/
        return text.replaceAll(settings) { all, name, value ->
            value ? "\u201c${TITLES[name]}: ${VALUES.get(all, value)}\u201d" : "\u201c${TITLES[name]}\u201d"
        }.replaceAll(/([\d.]+),([\d.]+),([\d.]+)(px|um)\b/, '$3 \u00d7 $2 \u00d7 $1$4')
            .replaceAll(/\b(\d+) x (\d+) x (\d+)\b/, '$3 \u00d7 $2 \u00d7 $1')
            .replaceAll(/(\d) ?px\b/, '$1 voxels').replaceAll(/(\d) ?um\b/, '$1 \u00b5m')
            .replaceAll(/\(confidence (\d\.\d+)\)/) { all, share -> "(confidence ${Math.round(100 * (share as double))}%)" }
            .replace(' (docs/training.md)', '').replace('along Z,Y,X', 'along x, y, z')
            .replaceFirst(/^(\w+)(?=: )/) { all, name -> TITLES.get(name, name) }
    }

    /** Convert a number as ImageJ counts, from 1, or a name, to the parameter `channel`. */
    static String channel(String text) { text ==~ /\d+/ ? String.valueOf((text as int) - 1) : text }

    /** Convert "3", "2-5" or "all", counted from 1, to the parameter `time`. */
    static String time(String text) {
        def range = text =~ /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/
        if (!range) return text.trim()
        int first = range[0][1] as int
        return range[0][2] ? "${first - 1}:${range[0][2]}" : String.valueOf(first - 1)
    }
}

/** The HTTP API. Waits while the service is busy, and repeats requests that are safe to repeat. */
class Service {
    static final ATTEMPTS = 6
    static final BLOCK_BYTES = 1 << 16
    final String url
    final String key

    Service(String url, String key) {
        this.url = (url.contains('://') ? url : "http://$url").trim().replaceAll('/+$', '')
        this.key = key?.trim()
    }

    Object get(String path) { Json.parse(send('GET', path)) }

    /**
     * Send a request, and return the text of the response, or save the response as `target`.
     * Raises Problem with the `detail` of the service, or Canceled if the user presses Esc.
     */
    String send(String method, String path, Map query = [:], File body = null, Map headers = [:], File target = null) {
        boolean isRepeatable = method == 'GET' || headers.containsKey('Idempotency-Key')
        for (int attempt = 1; ; attempt++) {
            try {
                return sendOnce(method, path, query, body, headers, target)
            } catch (Problem problem) {
                boolean isTemporary = problem.status in [429, 503] || (problem.status == 0 && isRepeatable && attempt < 3)
                if (!isTemporary || attempt == ATTEMPTS) throw problem
                pause(problem.retryAfter)
            }
        }
    }

    private String sendOnce(String method, String path, Map query, File body, Map headers, File target) {
        def encoded = query.findAll { it.value }.collect { "$it.key=${encode(it.value as String)}" }.join('&')
        HttpURLConnection connection = null
        try {
            connection = (HttpURLConnection) new URL("$url/$path${encoded ? "?$encoded" : ''}").openConnection()
            connection.requestMethod = method
            connection.connectTimeout = 20_000
            connection.readTimeout = 180_000
            // A redirect must not take the API key to another host.
            connection.instanceFollowRedirects = false
            if (key) connection.setRequestProperty('X-API-Key', key)
            headers.each { name, value -> connection.setRequestProperty(name as String, value as String) }
            if (body) upload(connection, body)
            else if (method == 'POST') connection.setRequestProperty('Content-Length', '0')
            int status = readStatus(connection)
            if (status < 200 || status >= 300) throw readProblem(connection, status)
            return download(connection.inputStream, target)
        } catch (SSLHandshakeException error) {
            throw new Problem("The certificate of $url is not trusted ($error.message). README.md describes how to add it.")
        } catch (IOException error) {
            throw new Problem("The service at $url did not respond ($error.message). " +
                'Check the address, and that the service is running.')
        } finally {
            connection?.disconnect()
        }
    }

    private static void upload(HttpURLConnection connection, File body) {
        connection.doOutput = true
        if (!connection.getRequestProperty('Content-Type'))
            connection.setRequestProperty('Content-Type', 'application/octet-stream')
        connection.setFixedLengthStreamingMode(body.length())
        try {
            body.withInputStream { source -> connection.outputStream.withStream { copy(source, it) } }
        } catch (IOException error) {
            // The service refuses some uploads before it has received them.
            if (readStatus(connection) < 400) throw error
        }
    }

    private static int readStatus(HttpURLConnection connection) {
        try {
            return connection.responseCode
        } catch (HttpRetryException error) {
            return error.responseCode()
        }
    }

    private Problem readProblem(HttpURLConnection connection, int status) {
        def text = connection.errorStream?.getText('UTF-8') ?: ''
        boolean isDocument = connection.contentType?.startsWith('application/problem+json') && text
        def members = isDocument ? Json.parse(text) : [:]
        def detail = members.detail ?: "The service at $url, or a proxy, responded with HTTP status $status. ${text.take(200)}"
        if (status in 300..399) detail = "The service has moved. Use the address ${connection.getHeaderField('Location')}"
        if (status == 401) detail = "${members.detail ?: 'This service requires an API key.'} Check the API key in the dialog."
        def problem = new Problem(Terms.describe(detail as String), status)
        problem.parameter = members.parameter
        def wait = connection.getHeaderField('Retry-After')
        if (wait ==~ /\d+/) problem.retryAfter = Math.min(60, wait as int)
        return problem
    }

    private static String download(InputStream source, File target) {
        if (!target) return source.getText('UTF-8')
        def part = new File(target.path + '.part')
        try {
            source.withStream { part.withOutputStream { file -> copy(source, file) } }
            target.delete()
            if (!part.renameTo(target)) throw new IOException("cannot write $target")
        } finally {
            part.delete()
        }
        return ''
    }

    private static void copy(InputStream source, OutputStream target) {
        def block = new byte[BLOCK_BYTES]
        for (int count = source.read(block); count >= 0; count = source.read(block)) {
            checkEscape()
            target.write(block, 0, count)
        }
    }

    static void pause(double seconds) {
        for (int step = 0; step < seconds * 10; step++) {
            checkEscape()
            Thread.sleep(100)
        }
        checkEscape()
    }

    static void checkEscape() { if (IJ.escapePressed()) throw new Canceled() }

    static String encode(String text) { URLEncoder.encode(text, 'UTF-8').replace('+', '%20') }
}

/** A job of the service. */
class Job {
    final Service service
    final String title
    Map report

    Job(Service service, String title) {
        this.service = service
        this.title = title
    }

    /** Send a stack, and wait for the result. Esc cancels the job on the service. */
    Job run(File stack, String name, Map parameters) {
        show('Sending the stack')
        def headers = ['Idempotency-Key': UUID.randomUUID(), 'X-Filename': Service.encode(name)]
        report = (Map) Json.parse(service.send('POST', 'jobs', parameters, stack, headers))
        try {
            while (!(report.state in ['done', 'failed', 'cancelled', 'expired'])) {
                Service.pause(0.4)
                report = (Map) service.get("jobs/$report.id")
                show(describeState())
            }
        } catch (Canceled canceled) {
            IJ.resetEscape()
            service.send('DELETE', "jobs/$report.id")
            throw canceled
        }
        if (report.state == 'done') return this
        def problem = new Problem(Terms.describe((report.problem?.detail ?: "The job was ${report.state}.") as String))
        problem.parameter = report.problem?.parameter
        throw problem
    }

    void save(String mediaType, File target) {
        show('Loading the result')
        service.send('GET', "jobs/$report.id/result", [:], null, [Accept: mediaType], target)
    }

    /** Warnings and notes in the words of the web page. */
    List<String> getWarnings() {
        def texts = (report.doubt ? [report.doubt.detail] : []) + report.warnings
        return texts.unique().collect { Terms.describe(it as String) }
    }

    String getSummary() {
        def count = report.objects == null ? 'Classes, not objects' : "$report.objects object${report.objects == 1 ? '' : 's'}"
        def diameter = report.diameter ? ", object diameter ${Terms.describe(report.diameter as String).replace('; stated', '').replace('; ', ', ')}" : ''
        return "$count$diameter, model $report.model"
    }

    private String describeState() {
        if (report.state == 'loading') return 'Loading the model'
        if (report.state != 'running')
            return report.position > 1 ? "${report.position - 1} jobs ahead in the queue" : 'Reading the stack'
        def (done, total) = [report.progress.done as double, report.progress.total as double]
        if (total) IJ.showProgress(done / total)
        if (total && done >= total) return 'Writing the result'
        def left = report.seconds_left == null ? '' : ", ${Math.ceil(report.seconds_left as double) as int} s left"
        return "Segmenting the stack${total ? ", ${Math.floor(100 * done / total) as int}% done" : ''}$left (Esc to cancel)"
    }

    private void show(String text) { IJ.showStatus("$title: $text") }
}

/** Conversions between images of ImageJ and files for the service. */
class Images {
    /** Micrometers by unit, without the plural, and "er" instead of "re". */
    static final MICROMETERS = ['\u00e5': 0.0001, angstrom: 0.0001, pm: 0.000001, picometer: 0.000001, nm: 0.001, nanometer: 0.001,
        um: 1, micron: 1, micrometer: 1, mm: 1000, millimeter: 1000, cm: 10_000, centimeter: 10_000, m: 1_000_000,
        meter: 1_000_000, in: 25_400, inch: 25_400, inches: 25_400, '"': 25_400]

    private static String count(int number, String noun) { "$number $noun${number == 1 ? '' : 's'}" }

    /** Return "x, y, z" in micrometers, or "" if the unit of an axis is not a length, or its size is not a number above 0. */
    static String voxelSize(ImagePlus image) {
        def calibration = image.calibration
        def factors = [calibration.XUnit, calibration.YUnit, calibration.ZUnit].collect { toMicrometers(it) }
        if (!factors.every()) return ''
        def sizes = [calibration.pixelWidth, calibration.pixelHeight, calibration.pixelDepth]
        // Stacks that were recorded from top to bottom may have a negative size.
        def lengths = [sizes, factors].transpose().collect { size, factor -> Math.abs((double) (size * factor)) }
        if (!lengths.every { it > 0 && it < Double.POSITIVE_INFINITY }) return ''
        return lengths.collect { new BigDecimal(it, new MathContext(9)).stripTrailingZeros().toPlainString() }.join(', ')
    }

    private static Number toMicrometers(String unit) {
        def name = (unit ?: '').trim().toLowerCase().replaceAll('[\u00b5\u03bc]', 'u')
        return MICROMETERS[name] ?: MICROMETERS[name.replaceAll(/(?<=\w{4})s$/, '').replaceAll(/metre$/, 'meter')]
    }

    /** Parse "x, y, z" in micrometers. Return null if the text is empty. */
    static List<Double> parseVoxelSize(String text) {
        if (!text?.trim()) return null
        def sizes = text.split(/[,\u00d7]|\s+x\s+/)*.trim()
        if (sizes.size() != 3 || !sizes.every { it ==~ /\d*\.?\d+([eE]-?\d+)?/ && it.toDouble() > 0 })
            throw new Problem("The voxel size \u201c${text}\u201d must consist of three positive numbers: x, y, z in \u00b5m.")
        return sizes*.toDouble()
    }

    /** Return the selected channel ("all", or a number from 1) and time points [first, last] of an image. */
    static ImagePlus select(ImagePlus image, String channel, int first, int last) {
        def source = image.type == ImagePlus.COLOR_RGB ? CompositeConverter.makeComposite(image) : image
        if (channel != 'all' && !(channel ==~ /\d+/ && (channel as int) in 1..source.NChannels))
            throw new Problem("There is no channel $channel. The image has ${count(source.NChannels, 'channel')}, counted from 1.")
        if (first < 1 || last > source.NFrames || first > last)
            throw new Problem("There are no time points $first to $last. The image has ${count(source.NFrames, 'time point')}, counted from 1.")
        def channels = channel == 'all' ? (1..source.NChannels) : [channel as int]
        def stack = new ImageStack(source.width, source.height)
        for (int t in first..last) for (int z in 1..source.NSlices) for (int c in channels)
            stack.addSlice('', source.stack.getPixels(source.getStackIndex(c, z, t)))
        def part = new ImagePlus(image.title, stack)
        part.setDimensions(channels.size(), source.NSlices, last - first + 1)
        part.openAsHyperStack = true
        return part
    }

    static Calibration calibrate(ImagePlus image, List<Double> voxelSize) {
        def calibration = image.calibration.copy()
        calibration.disableDensityCalibration()
        if (voxelSize == null) return calibration
        if (parseVoxelSize(Images.voxelSize(image)) == voxelSize) return calibration
        calibration.pixelWidth = voxelSize[0]
        calibration.pixelHeight = voxelSize[1]
        calibration.pixelDepth = voxelSize[2]
        calibration.unit = '\u00b5m'
        return calibration
    }

    static File saveTiff(ImagePlus image) {
        def file = File.createTempFile('stackseg-', '.tif')
        file.deleteOnExit()
        def saver = new FileSaver(image)
        if (!(image.stackSize > 1 ? saver.saveAsTiffStack(file.path) : saver.saveAsTiff(file.path)))
            throw new Problem("The image cannot be saved in $file.parent. Is the disk full?")
        return file
    }

    /** Save labels [Z, Y, X] of one time point as uint32 in the format of NumPy. ImageJ cannot write TIFFs of uint32. */
    static File saveLabels(ImagePlus labels, int time) {
        def file = File.createTempFile('stackseg-', '.npy')
        file.deleteOnExit()
        def header = "{'descr': '<u4', 'fortran_order': False, 'shape': ($labels.NSlices, $labels.height, $labels.width), }"
        header = header.padRight((int) Math.ceil((header.size() + 11) / 64) * 64 - 11) + '\n'
        file.withOutputStream { output ->
            output.write([0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, header.size() & 255, header.size() >> 8].collect {
                (it instanceof String ? (int) it.charAt(0) : it) as byte
            } as byte[])
            output.write(header.getBytes('US-ASCII'))
            for (int z in 1..labels.NSlices)
                output.write(toBytes(labels.stack.getProcessor(labels.getStackIndex(labels.channel, z, time))))
        }
        return file
    }

    @CompileStatic
    private static byte[] toBytes(ImageProcessor plane) {
        ByteBuffer buffer = ByteBuffer.allocate(4 * plane.pixelCount).order(ByteOrder.LITTLE_ENDIAN)
        for (int i = 0; i < plane.pixelCount; i++) {
            float value = plane.getf(i)
            if (!(value >= 0f && value < 4294967296f && value == Math.rint(value)))
                throw new Problem('The corrected labels must be whole numbers, one per object, and 0 for the background. ' +
                    "The image contains $value.")
            buffer.putInt((int) (long) value)
        }
        return buffer.array()
    }

    /** Convert a table in CSV. `True` and `False` become 1 and 0. */
    static ResultsTable readTable(File file) {
        def lines = file.getText('UTF-8').readLines()
        def names = lines[0].split(',')
        def table = new ResultsTable()
        table.showRowNumbers(false)
        table.precision = 6
        lines.drop(1).findAll().each { line ->
            table.incrementCounter()
            [names, line.split(',', -1)].transpose().each { name, text ->
                if (text in ['True', 'False']) table.addValue(name, text == 'True' ? 1d : 0d)
                else if (text ==~ /-?[\d.]+([eE][-+]?\d+)?/) table.addValue(name, text.toDouble())
                else table.addValue(name, text)
            }
        }
        return table
    }
}

/** The three tasks. They need no dialogs: the settings are texts, as in README.md. */
class Tasks {
    static final SEGMENT = 'Segment the current image'
    static final FOLDER = 'Segment a folder'
    static final ANNOTATE = 'Save as annotated stack'
    static final PASSED_ON = ['model', 'diameter', 'threshold', 'minimum_size', 'border', 'quality']
    final Service service
    final Map settings

    Tasks(Service service, Map settings) {
        this.service = service
        this.settings = settings
    }

    /** Segment an image. Return the label image, the table of objects (null for classes) and the finished job. */
    List segment(ImagePlus image) {
        def parameters = createParameters()
        def channel = settings.channel ?: (image.NChannels > 1 ? '' : '1')
        if (!channel) throw new Problem("Select the channel to segment. The image has $image.NChannels channels.")
        def (first, last) = parseTimes(settings.time ?: '1', image.NFrames)
        def part = Images.select(image, channel, first, last)
        def voxelSize = Images.parseVoxelSize(settings.voxel_size == null ? Images.voxelSize(image) : settings.voxel_size)
        def calibration = Images.calibrate(image, voxelSize)
        if (voxelSize) {
            part.calibration = calibration
            parameters.voxel_size = voxelSize.reverse().join(',')
        }
        if (part.NFrames > 1) parameters.time = 'all'
        if (part.NFrames > 1 && settings.link) parameters.link = settings.link
        def files = [Images.saveTiff(part)]
        try {
            def name = image.title.replaceAll(/\.tiff?$/, '')
            def job = new Job(service, image.title).run(files[0], "${name}.tif", parameters)
            files << File.createTempFile('stackseg-', '.tif')
            job.save('image/tiff', files[1])
            def labels = openLabels(files[1], "${name}_labels", part, calibration, job)
            if (!parameters.measurements) return [labels, null, job]
            files << File.createTempFile('stackseg-', '.csv')
            job.save('text/csv', files[2])
            return [labels, Images.readTable(files[2]), job]
        } finally {
            files*.delete()
        }
    }

    private static ImagePlus openLabels(File file, String title, ImagePlus part, Calibration calibration, Job job) {
        // The file contains a color per object.
        def labels = new Opener().openImage(file.path)
        if (!labels) throw new Problem('ImageJ cannot open the labels. Is there enough memory? See Edit > Options > Memory.')
        labels.title = title
        if (labels.stackSize == part.NSlices * part.NFrames) labels.setDimensions(1, part.NSlices, part.NFrames)
        labels.openAsHyperStack = part.NFrames > 1
        labels.calibration = calibration
        def facts = (["StackSeg: $job.summary"] + job.warnings).join('\n')
        labels.setProperty('Info', "$facts\n${labels.getProperty('Info') ?: ''}".toString())
        return labels
    }

    /**
     * Segment all matching files of a folder, and save the labels and tables in `output`.
     * Continue after errors. Return the number of stacks without a result. Stacks with labels are skipped.
     */
    int segmentFolder(File folder, File output) {
        if (!folder.directory) throw new Problem("There is no folder $folder.")
        if (!output.directory && !output.mkdirs()) throw new Problem("The folder $output cannot be created.")
        def matcher = FileSystems.default.getPathMatcher("glob:${settings.files ?: '*.{tif,tiff,lsm,czi,nd2,lif,oib,ims}'}")
        def stacks = folder.listFiles().findAll { file ->
            file.file && !(file.name =~ /^\.|_labels(\.ome)?\.tiff?$/) && matcher.matches(new File(file.name).toPath())
        }.sort { it.name }
        if (!stacks) throw new Problem("The folder $folder contains no matching files.")
        def parameters = createParameters()
        if (settings.channel) parameters.channel = Terms.channel(settings.channel)
        if (settings.time) parameters.time = Terms.time(settings.time)
        if (settings.link && parameters.time?.matches('all|.*:.*')) parameters.link = settings.link
        if (settings.voxel_size) parameters.voxel_size = Images.parseVoxelSize(settings.voxel_size).reverse().join(',')
        int failed = 0
        stacks.eachWithIndex { stack, index ->
            def labels = new File(output, "${stack.name}_labels.ome.tif")
            def message = 'has labels already; delete them to segment it again'
            try {
                if (!labels.exists()) message = segmentFile(stack, labels, "${index + 1} of ${stacks.size()}", parameters)
            } catch (Problem problem) {
                if (problem.status == 401) throw problem
                failed++
                def isCounted = problem.message =~ /(?i)channel|time/
                message = "Error: $problem.message${isCounted ? ' (This message counts from 0, the dialog from 1.)' : ''}"
            }
            write(output, "$stack.name: $message")
        }
        write(output, "${stacks.size() - failed} of ${stacks.size()} stacks have labels.")
        return failed
    }

    private String segmentFile(File stack, File labels, String position, Map parameters) {
        def job = new Job(service, "$position: $stack.name").run(stack, stack.name, parameters)
        if (parameters.measurements) job.save('text/csv', new File(labels.path.replace('_labels.ome.tif', '_objects.csv')))
        // The labels are saved last: stacks with labels are complete.
        job.save('image/tiff', labels)
        return ([job.summary] + job.warnings).join('. ').replace('..', '.')
    }

    private static void write(File output, String line) {
        IJ.log(line)
        def time = new Date().toInstant().toString().take(19)
        new File(output, 'stackseg_log.txt').append("$time $line\n", 'UTF-8')
    }

    /** Save an image with corrected labels as an annotated stack. `time` counts from 1. Return the report of the service. */
    Map annotate(ImagePlus image, ImagePlus labels, int time) {
        if (labels.type == ImagePlus.COLOR_RGB)
            throw new Problem('The corrected labels have RGB colors. Select the image in which each object has its own number.')
        if ([image.width, image.height, image.NSlices] != [labels.width, labels.height, labels.NSlices])
            throw new Problem("The labels have ${size(labels)} voxels, but the stack $image.title has ${size(image)}.")
        def channel = settings.channel ?: (image.NChannels > 1 ? '' : '1')
        if (!channel) throw new Problem("Select the channel to segment. The image has $image.NChannels channels.")
        def part = Images.select(image, channel, time, time)
        part.calibration = Images.calibrate(image, null)
        def files = [Images.saveLabels(labels, labels.NFrames > 1 ? time : 1), Images.saveTiff(part)]
        try {
            IJ.showStatus('Sending the stack')
            def headers = ['X-Filename': Service.encode("${image.title.replaceAll(/\.tiff?$/, '')}.tif")]
            def stack = (Map) Json.parse(service.send('POST', 'stacks', [:], files[1], headers))
            IJ.showStatus('Sending the corrected labels')
            def voxelSize = Images.parseVoxelSize(Images.voxelSize(image))?.reverse()?.join(',')
            def query = [stack: stack.id, name: settings.name, region: settings.region, voxel_size: voxelSize]
            return (Map) Json.parse(service.send('POST', 'annotations', query, files[0], ['Content-Type': 'application/x-npy']))
        } finally {
            files*.delete()
        }
    }

    private static String size(ImagePlus image) { "$image.width \u00d7 $image.height \u00d7 $image.NSlices" }

    private Map createParameters() {
        def parameters = settings.findAll { it.key in PASSED_ON && it.value }
        def list = service.get('models')
        def model = list.models.find { it.name == (settings.model ?: list.default) }
        // Classes have no table of objects.
        if (!(model?.decoding in ['classes', 'regions'])) parameters.measurements = 'zip'
        return parameters
    }

    private static List<Integer> parseTimes(String text, int frames) {
        if (text == 'all') return [1, frames]
        def range = text =~ /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/
        if (!range) throw new Problem("The time points \u201c${text}\u201d must be a number, a range such as 2-5, or all.")
        return [range[0][1] as int, (range[0][2] ?: range[0][1]) as int]
    }
}

/** The dialogs. Their labels are those of the web page. */
class Dialogs {
    static final DIAMETERS = ['model default': '', 'estimated from the stack': 'auto', 'custom, in voxels': 'px',
        'original resolution': 'none']
    static final BORDERS = ['model default': '', 'keep': 'keep', 'remove': 'drop']
    static final QUALITIES = ['fast': '', 'best (about ten times slower)': 'best']

    static void run() {
        def start = new GenericDialog('StackSeg')
        start.addChoice('Task', [Tasks.SEGMENT, Tasks.FOLDER, Tasks.ANNOTATE] as String[], Prefs.get('stackseg.task', Tasks.SEGMENT))
        start.addStringField('Address of the service', Prefs.get('stackseg.url', 'http://localhost:8000'), 30)
        start.addStringField('API key (if required)', Prefs.get('stackseg.key', ''), 30)
        def keyField = start.stringFields.lastElement()
        keyField.echoChar = '\u2022' as char
        show(start, 'Continue')
        def task = start.nextChoice
        def url = start.nextString
        // Not read with getNextString, which would write the key into recorded macros.
        def service = new Service(url, keyField.text)
        def models = (Map) service.get('models')
        Prefs.set('stackseg.task', task)
        Prefs.set('stackseg.url', url)
        Prefs.set('stackseg.key', keyField.text.trim())
        Prefs.savePreferences()
        if (task == Tasks.SEGMENT) segment(service, models)
        else if (task == Tasks.FOLDER) segmentFolder(service, models)
        else annotate(service)
    }

    private static void segment(Service service, Map models) {
        def image = getImage('Open a stack, and run StackSeg again.')
        def dialog = new GenericDialog(Tasks.SEGMENT)
        addChannel(dialog, image)
        if (image.NFrames > 1) addTimes(dialog, String.valueOf(image.frame))
        dialog.addStringField('Voxel size x, y, z in \u00b5m', Images.voxelSize(image), 20)
        addModel(dialog, models)
        show(dialog, 'Segment')
        def settings = [:]
        settings.channel = readChannel(dialog, image)
        if (image.NFrames > 1) settings.putAll(readTimes(dialog))
        settings.voxel_size = dialog.nextString
        settings.putAll(readModel(dialog))
        def (labels, table, job) = new Tasks(service, settings).segment(image)
        labels.show()
        table?.show("Objects of $labels.title")
        IJ.showStatus(job.summary)
        if (job.warnings) IJ.showMessage('StackSeg', ([job.summary + '.'] + job.warnings).collect { wrap(it) }.join('\n \n'))
    }

    private static void segmentFolder(Service service, Map models) {
        def folder = IJ.getDirectory('Folder with stacks')
        if (!folder) throw new Canceled()
        def dialog = new GenericDialog(Tasks.FOLDER)
        dialog.addStringField('Folder for the results', folder, 30)
        dialog.addStringField('Files', '*.{tif,tiff,lsm,czi,nd2,lif,oib,ims}', 30)
        dialog.addStringField('Channel to segment (number, name, or empty)', '', 10)
        addTimes(dialog, '')
        dialog.addStringField('Voxel size x, y, z in \u00b5m (empty: as in the files)', '', 20)
        addModel(dialog, models)
        show(dialog, 'Segment')
        def output = new File(dialog.nextString)
        def settings = [files: dialog.nextString, channel: dialog.nextString.trim()]
        settings.putAll(readTimes(dialog))
        settings.voxel_size = dialog.nextString
        settings.putAll(readModel(dialog))
        new Tasks(service, settings).segmentFolder(new File(folder), output)
        IJ.showStatus("The results are in $output")
    }

    private static void annotate(Service service) {
        def labels = getImage('Open the corrected labels, and run StackSeg again.')
        def images = (WindowManager.IDList as List).collect { WindowManager.getImage(it) }.findAll {
            it != labels && [it.width, it.height, it.NSlices] == [labels.width, labels.height, labels.NSlices]
        }
        if (!images) throw new Problem("Open the stack that belongs to the labels $labels.title, with the same size.")
        def likely = images.find { labels.title.startsWith(it.title.replaceAll(/\.tiff?$/, '')) } ?: images[0]
        def dialog = new GenericDialog(Tasks.ANNOTATE)
        dialog.addMessage("Corrected labels: $labels.title")
        dialog.addChoice('Stack', images*.title as String[], likely.title)
        dialog.addNumericField('Channel to segment', 1, 0)
        dialog.addStringField('Name', likely.title.replaceAll(/\.tiff?$/, ''), 20)
        if (labels.roi) dialog.addCheckbox('Only the selection was corrected', false)
        show(dialog, 'Save as annotated stack')
        def image = images[dialog.nextChoiceIndex]
        def settings = [channel: String.valueOf(dialog.nextNumber as int), name: dialog.nextString]
        def box = labels.roi?.bounds
        if (box && dialog.nextBoolean)
            settings.region = "0:$labels.NSlices,$box.y:${box.y + box.height},$box.x:${box.x + box.width}".toString()
        def report = new Tasks(service, settings).annotate(image, labels, labels.NFrames > 1 ? labels.frame : image.frame)
        IJ.showMessage('StackSeg', "Saved as $report.name.\nTo improve the model, open $service.url")
    }

    private static ImagePlus getImage(String advice) {
        def image = WindowManager.currentImage
        if (!image) throw new Problem("No image is open. $advice")
        return image
    }

    private static int countChannels(ImagePlus image) { image.type == ImagePlus.COLOR_RGB ? 3 : image.NChannels }

    private static void addChannel(GenericDialog dialog, ImagePlus image) {
        int count = countChannels(image)
        if (count > 1) dialog.addChoice('Channel to segment', (1..count).collect { "$it" } + 'all channels' as String[], "$image.channel")
    }

    private static String readChannel(GenericDialog dialog, ImagePlus image) {
        countChannels(image) == 1 ? '1' : dialog.nextChoice.replace('all channels', 'all')
    }

    private static void addTimes(GenericDialog dialog, String time) {
        dialog.addStringField('Time points (such as 3, 2-5 or all)', time, 10)
        dialog.addCheckbox('Track objects over time', false)
    }

    private static Map readTimes(GenericDialog dialog) {
        [time: dialog.nextString.trim(), link: dialog.nextBoolean ? 'overlap' : '']
    }

    private static void addModel(GenericDialog dialog, Map models) {
        def names = models.models.findAll { !it.problem }*.name
        def last = Prefs.get('stackseg.model', models.default ?: names[0])
        dialog.addChoice('Model', names as String[], last in names ? last : names[0])
        dialog.addChoice('Object diameter', DIAMETERS.keySet() as String[], Prefs.get('stackseg.diameter', 'model default'))
        dialog.addNumericField('Object diameter in voxels', Prefs.get('stackseg.voxels', 15d), 1)
        dialog.addStringField('Foreground threshold (0 to 1, or empty)', '', 8)
        dialog.addStringField('Minimum object size (voxels, or 12.5um3)', '', 8)
        dialog.addChoice('Objects at the border', BORDERS.keySet() as String[], 'model default')
        dialog.addChoice('Quality', QUALITIES.keySet() as String[], 'fast')
    }

    private static Map readModel(GenericDialog dialog) {
        def settings = [model: dialog.nextChoice]
        def diameter = dialog.nextChoice
        double voxels = dialog.nextNumber
        Prefs.set('stackseg.model', settings.model)
        Prefs.set('stackseg.diameter', diameter)
        Prefs.set('stackseg.voxels', voxels)
        settings.diameter = DIAMETERS[diameter] == 'px' ? "${voxels}px".toString() : DIAMETERS[diameter]
        settings.threshold = dialog.nextString.trim()
        settings.minimum_size = dialog.nextString.trim()
        settings.border = BORDERS[dialog.nextChoice]
        settings.quality = QUALITIES[dialog.nextChoice]
        return settings
    }

    private static void show(GenericDialog dialog, String action) {
        dialog.setOKLabel(action)
        dialog.showDialog()
        if (dialog.wasCanceled()) throw new Canceled()
    }

    static String wrap(String text) { text.replaceAll(/(.{60,80}?) /, '$1\n') }
}

/** Runs without dialogs: `task=segment image=stack.tif output=labels.tif`. */
class Arguments {
    static final NAMES = ['task', 'url', 'key', 'image', 'labels', 'output', 'table', 'folder', 'files', 'channel', 'time', 'link',
        'voxel_size', 'name', 'region'] + Tasks.PASSED_ON

    static void run(List<String> arguments) {
        def settings = arguments.collectEntries { it.contains('=') ? it.split('=', 2) as List : [it, ''] }
        def unknown = settings.keySet().find { !(it in NAMES) }
        if (unknown) throw new Problem("Unknown argument $unknown. The arguments are ${NAMES.join(', ')}.")
        def tasks = new Tasks(new Service(settings.url ?: 'http://localhost:8000', settings.key ?: System.getenv('STACKSEG_KEY')), settings)
        if (settings.task == 'segment') segment(tasks, settings)
        else if (settings.task == 'folder') {
            int failed = tasks.segmentFolder(new File(settings.folder ?: '.'), new File(settings.output ?: settings.folder ?: '.'))
            if (failed) throw new Problem("$failed ${failed == 1 ? 'stack' : 'stacks'} failed; see stackseg_log.txt.")
        } else if (settings.task == 'annotate') {
            def report = tasks.annotate(open(settings.image), open(settings.labels), (settings.time ?: '1') as int)
            println "Saved as $report.name, id $report.id"
        } else throw new Problem('Specify one of task=segment, task=folder and task=annotate.')
    }

    private static void segment(Tasks tasks, Map settings) {
        def output = settings.output ? new File(settings.output).absoluteFile : null
        if (!(output?.name ==~ /(?i).+\.tiff?/)) throw new Problem('Specify a TIFF file for the labels: output=labels.tif')
        if (!output.parentFile.isDirectory()) throw new Problem("The folder $output.parent does not exist.")
        for (name in ['output', 'table'])
            if (settings[name] && settings.image && new File(settings[name]).canonicalFile == new File(settings.image).canonicalFile)
                throw new Problem("$name=${settings[name]} would replace the stack. Choose another name.")
        def (labels, table, job) = tasks.segment(open(settings.image))
        boolean isSaved = labels.stackSize > 1 ? new FileSaver(labels).saveAsTiffStack(settings.output)
            : new FileSaver(labels).saveAsTiff(settings.output)
        if (!isSaved) throw new Problem("The labels cannot be saved as $settings.output.")
        if (settings.table && table) table.save(settings.table)
        println "$job.summary"
        job.warnings.each { println it }
    }

    private static ImagePlus open(String path) {
        def image = path ? new Opener().openImage(path) : null
        if (!image) throw new Problem("ImageJ cannot open ${path ?: 'an image; specify image=FILE'}.")
        return image
    }
}

// Without a display, there are no dialogs.
boolean hasArguments = (binding.hasVariable('args') && args) || GraphicsEnvironment.headless
IJ.resetEscape()
try {
    if (hasArguments) Arguments.run(binding.hasVariable('args') ? args as List : [])
    else Dialogs.run()
} catch (Canceled ignored) {
    IJ.showStatus('Canceled')
    if (hasArguments) System.exit(1)
} catch (Problem problem) {
    if (!hasArguments) IJ.error('StackSeg', Dialogs.wrap(problem.message))
    else {
        System.err.println(problem.message)
        System.exit(1)
    }
} finally {
    IJ.showProgress(1d)
}
