"""Images: residual networks and their files.

model = fresh(PRESETS["resnet20"](), rng)       # or load("resnet50.pth").model
scores = model(images)                          # (B, classes)
"""
