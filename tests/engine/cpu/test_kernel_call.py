import threading

import torch

from service.engine.cpu.kernel_call import KernelCall, observe_calls
from service.engine.cpu.pixel_shuffle import SpaceToDepth


def fold(x):
    return SpaceToDepth((2, 2, 2))(x)


def test_every_step_is_overheard_with_what_it_took_and_nothing_before_or_after():
    heard = list[KernelCall]()
    x = torch.randn(2, 1, 4, 6, 8)
    fold(x)
    with observe_calls(heard.append):
        y = fold(x)
    fold(x)
    (call,) = heard
    assert call.kernel == "stackseg_space_to_depth"
    assert (call.inputs[0].data_ptr(), call.output.data_ptr()) == (x.data_ptr(), y.data_ptr())
    assert call.sizes == (2, 1, 2, 3, 4, 2, 2, 2, 4)


def test_other_threads_are_not_observe_calls():
    heard = list[KernelCall]()
    with observe_calls(heard.append):
        thread = threading.Thread(target=fold, args=(torch.randn(1, 1, 4, 4, 4),))
        thread.start()
        thread.join()
    assert not heard
