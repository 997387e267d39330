// The ranks in ComfyUI's own page: a tab of the side bar. Pages without a side bar get a button that opens rank 0's page of the ranks.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { RanksView, jsonGetter } from "./ranks_view.js";

const ROUTES = "/phase_parallel/";

function addTab() {
    let view = null;
    app.extensionManager.registerSidebarTab({
        id: "phase-parallel-ranks",
        icon: "pi pi-server",
        title: "Ranks",
        label: "Ranks",
        tooltip: "Ranks (ComfyUI-PhaseParallel)",
        type: "custom",
        render(container) {
            view?.stop();
            const root = document.createElement("div");
            container.replaceChildren(root);
            view = new RanksView(root, jsonGetter((path, options) => api.fetchApi(ROUTES + path, options)));
            view.start();
        },
        destroy() {
            view?.stop();
            view = null;
        },
    });
}

function addButton() {
    const button = document.createElement("button");
    button.id = "phase-parallel-ranks";
    button.textContent = "Ranks";
    button.title = "What every rank is doing (opens a page)";
    button.onclick = () => window.open(api.apiURL(`${ROUTES}ui`), "phase-parallel-ranks", "noopener");
    app.ui?.menuContainer?.append(button);
}

app.registerExtension({
    name: "PhaseParallel.Ranks",
    async setup() {
        if (app.extensionManager?.registerSidebarTab) {
            addTab();
        } else {
            addButton();
        }
    },
});
