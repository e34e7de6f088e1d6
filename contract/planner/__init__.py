"""How long one training step takes on given devices and links: predicted from sizes alone, no measured step goes in.

work.py      the time of a layer's products and of the update on a device
program.py   what one rank does in a step, in its order: compute, collectives, messages
simulate.py  the event simulation: ranks that wait for one another, and links that they share
predict.py   a run on a machine -> the time of its step, split into what it is spent on, and its memory
search.py    all meshes of a machine, ranked
crossings.py where another mesh becomes the fastest, and what would help most
"""
