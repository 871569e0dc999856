"""A refused call leaves a pipeline as it was."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.pipelines.scheduler import StepState, port_scheduler, resume_from
from tests import small_pipelines


def test_a_mesh_that_does_not_divide_a_network_leaves_all_of_them_alone():
    pipe = small_pipelines.build()
    before = {name: type(part) for name, part in pipe.components.items()}
    with pytest.raises(ValueError, match="tp=3"):
        port(pipe, mesh=make_mesh(dp=1, tp=3))
    assert {name: type(part) for name, part in pipe.components.items()} == before
    assert all(parameter.device.type == "cpu" for parameter in pipe.vae.parameters())


def test_a_scheduler_that_counts_its_steps_resumes_nothing():
    scheduler = port_scheduler(DPMSolverMultistepScheduler())
    with pytest.raises(ValueError, match="DPMSolverMultistepScheduler cannot be taken up at a step"):
        resume_from(scheduler, StepState(done=3, latents=torch.zeros(1, 3, 16, 4, 4)))
    assert scheduler.watch.resume is None


def test_a_run_that_was_refused_resumes_nothing():
    pipe = port(small_pipelines.build())
    whole = pipe(**small_pipelines.inputs("text")).frames
    latents = torch.zeros(1, 3, 16, small_pipelines.HEIGHT // 2, small_pipelines.WIDTH // 2)
    resume_from(pipe.scheduler, StepState(done=3, latents=latents))
    with pytest.raises(ValueError, match="multiples of"):
        pipe(**small_pipelines.inputs("text", height=7))
    again = pipe(**small_pipelines.inputs("text")).frames
    assert torch.equal(torch.as_tensor(again), torch.as_tensor(whole))
