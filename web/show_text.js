// Shows what our text nodes return for the page in a read-only box on the node. Newer pages show the same text by
// themselves while a node runs; there nothing is added.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODES = ["HunyuanImage3Rewrite", "HunyuanImage3Ask", "HunyuanImage3Ranks"];
const BOX = "shown_text";
const OWN_BOX_OF_NEWER_PAGES = "$$node-text-preview";

app.registerExtension({
    name: "PhaseParallel.ShowText",
    beforeRegisterNodeDef(nodeType, nodeData) {
        if (!NODES.includes(nodeData.name)) {
            return;
        }
        const onExecuted = nodeType.prototype.onExecuted;
        nodeType.prototype.onExecuted = function (output) {
            onExecuted?.apply(this, arguments);
            if (!output?.text || this.widgets?.some((widget) => widget.name === OWN_BOX_OF_NEWER_PAGES)) {
                return;
            }
            let box = this.widgets?.find((widget) => widget.name === BOX);
            if (!box) {
                box = ComfyWidgets.STRING(this, BOX, ["STRING", { multiline: true }], app).widget;
                box.inputEl.readOnly = true;
                // Only shown, not an input: it is not sent with the graph.
                box.serialize = false;
                box.options = { ...box.options, serialize: false };
                const needed = this.computeSize();
                this.setSize(this.size.map((side, axis) => Math.max(side, needed[axis])));
            }
            box.value = [].concat(output.text).join("\n");
            this.setDirtyCanvas(true, true);
        };
    },
});
