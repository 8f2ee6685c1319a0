"""allmask on a Ray cluster: `serve run deploy.ray_serve:app`. $ALLMASK_MODELS names the models, with spaces between."""

import os

from ray import serve


def application():
    """Made in each replica, which loads the models once."""
    from allmask.serve.app import make_app
    from allmask.serve.models import load_models
    from allmask.serve.settings import Settings

    settings = Settings(api_key=os.environ.get("ALLMASK_API_KEY"))
    return make_app(load_models(os.environ.get("ALLMASK_MODELS", "allmask-en").split(), settings), settings)


replicas = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 32}
app = serve.deployment(
    serve.ingress(application)(), name="allmask", autoscaling_config=replicas, max_ongoing_requests=256,
    ray_actor_options={"num_cpus": 1},
).bind()  # fmt: skip
