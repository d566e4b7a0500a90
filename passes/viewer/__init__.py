"""One page with the graph of a model, or of two with their difference: no server, no network, no request.

scene.py      the nodes, edges and modules to draw, as data; with a second model what is added, removed and changed
page.py       the page: viewer.html with viewer.css, viewer.js, cytoscape and dagre inlined
viewer.js     folding by module, search, colours, keys

cytoscape (MIT) draws and dagre (MIT) lays out; both are bundled as npm publishes them, with their licences.
"""

from passes.viewer.page import render, view_data, view_models
from passes.viewer.scene import Scene, scene_of
