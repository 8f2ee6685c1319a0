"""Images: residual networks, their files, and data sets of small pictures.

data = read("cifar-10-batches-bin")             # images.py: pixels, labels, names
model = fresh(PRESETS["resnet20"](), rng)       # resnet.py; or files.load("resnet50.pth").model
scores = model(normalized(data.pixels[:128], *statistics(data.pixels)))
"""
