"""Generative adversarial networks (arXiv 1406.2661): one network makes examples, another tells them from real ones.

networks.py   the two, for numbers on a line (toy) and for images (mlp, dcgan)
learning.py   Algorithm 1 in the project's training loop: k steps of the discriminator, then one of the generator
theory.py     what the two should arrive at, by integrals: the best discriminator, the value of the game
judging.py    how good and how varied images are, by a classifier trained apart
running.py    a run, from its plan to its final folder
"""
