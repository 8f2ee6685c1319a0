"""Image classification with residual networks.

datasets.py      read data sets: folders of images, MNIST, CIFAR-10, npz
images.py        images in memory, image files, normalization
pickled.py       numpy arrays from a pickle, without executing it
resnet.py        the networks and their presets
checkpoints.py   load and save them
training.py      augmentation, batches, a training run (`allmask train --task image`)
task.py          prediction and evaluation with a trained network

data = read("cifar-10-batches-bin")             # datasets.py: pixels, labels, names
model = fresh(PRESETS["resnet20"](), rng)       # resnet.py; or checkpoints.load("resnet50.pth").model
logits = model(normalize(data.pixels[:128], *statistics(data.pixels)))
"""
