"""Generative adversarial networks (arXiv 1406.2661): a generator, and a discriminator of its output and data.

networks.py   both networks, for numbers (toy) and for images (mlp, dcgan); load and save
training.py   Algorithm 1 in the training loop, and a run (`allmask train --task gan`)
toy.py        the toy in one dimension: its pictures, and the theory it is compared with
metrics.py    quality and variety of generated images, measured by a classifier
"""
