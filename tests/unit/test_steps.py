import pytest
import torch
from torch import nn

from lightning_weightsync.steps import OptimizerStepCounter, owning_optimizers


def backward(net):
    net.zero_grad()
    loss = net(torch.ones(4, 2)).square().sum()
    loss.backward()
    return loss


class Wrapped(torch.optim.SGD):
    """The case in which torch runs the hooks twice per step: both classes' step functions are patched."""

    def step(self, closure=None):
        return super().step(closure)


class Stumbling(torch.optim.SGD):
    raises = False

    def step(self, closure=None):
        super().step(closure)
        if self.raises:
            raise RuntimeError("stumbled")


@pytest.fixture
def net():
    return nn.Linear(2, 1)


@pytest.fixture
def steps():
    return []


@pytest.fixture
def count(steps):
    counters = []

    def start(*optimizers):
        counters.append(OptimizerStepCounter(optimizers, lambda: steps.append(len(steps))))
        return counters[-1]

    yield start
    for counter in counters:
        counter.remove()


class TestOptimizerStepCounter:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
    def test_each_step_is_counted_after_the_update(self, net, kind):
        optimizer = kind(net.parameters(), lr=0.1)
        seen = []
        counter = OptimizerStepCounter([optimizer], lambda: seen.append(net.weight.detach().clone()))
        for index in range(3):
            backward(net)
            optimizer.step()
            assert len(seen) == index + 1
            assert torch.equal(seen[-1], net.weight)
        counter.remove()

    def test_lbfgs_is_one_step_however_often_it_calls_its_closure(self, net, count, steps):
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=4)
        closures = []
        count(optimizer)
        optimizer.step(lambda: closures.append(1) or backward(net))
        assert len(closures) > 1
        assert len(steps) == 1

    def test_a_subclass_that_calls_super_is_counted_once_per_step(self, net, count, steps):
        torch.optim.SGD(net.parameters(), lr=0.1)  # patches SGD.step, as any earlier SGD of the process does
        optimizer = Wrapped(net.parameters(), lr=0.1)
        fired = []
        optimizer.register_step_post_hook(lambda *_: fired.append(1))
        count(optimizer)
        for _ in range(3):
            backward(net)
            optimizer.step()
        assert len(fired) == 6
        assert len(steps) == 3

    def test_a_step_that_raised_is_forgotten_by_the_reset(self, net, count, steps):
        optimizer = Stumbling(net.parameters(), lr=0.1)
        counter = count(optimizer)
        backward(net)
        optimizer.raises = True
        with pytest.raises(RuntimeError, match="stumbled"):
            optimizer.step()
        assert steps == []
        optimizer.raises = False
        counter.reset_depth()
        optimizer.step()
        assert len(steps) == 1

    def test_two_optimizers_are_counted_together_and_apart_from_a_third(self, count, steps):
        nets = [nn.Linear(2, 1) for _ in range(3)]
        first, second, third = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        count(first, second)
        for net, optimizer in zip(nets, (first, second, third), strict=True):
            backward(net)
            optimizer.step()
        second.step()
        assert len(steps) == 3

    def test_what_the_callback_raises_leaves_through_step_and_counting_goes_on(self, net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        calls = []

        def on_step():
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("push failed")

        counter = OptimizerStepCounter([optimizer], on_step)
        with pytest.raises(ValueError, match="push failed"):
            optimizer.step()
        optimizer.step()
        assert len(calls) == 2
        counter.remove()

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_step_that_the_gradient_scaler_skips_is_not_counted(self, net, count, steps, fused):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        count(optimizer)
        for factor in (1.0, float("inf"), 1.0):
            before = net.weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4, 2)).square().sum() * factor).backward()
            counted = len(steps)
            scaler.step(optimizer)
            scaler.update()
            changed = not torch.equal(before, net.weight)
            assert len(steps) - counted == int(changed)
        assert len(steps) == 2

    def test_after_remove_nothing_is_counted_and_no_hook_is_left(self, net, count, steps):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        counter = count(optimizer)
        counter.remove()
        counter.remove()
        optimizer.step()
        assert steps == []
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks

    def test_an_optimizer_without_hooks_is_refused_and_the_others_are_left_clean(self, net, count):
        class NoHooks:
            param_groups = ()

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="NoHooks.*interval_unit='batches'"):
            count(optimizer, NoHooks())
        assert not optimizer._optimizer_step_pre_hooks

    def test_an_optimizer_that_skipped_the_base_constructor_is_refused(self, net, count):
        class Half(torch.optim.Optimizer):
            def __init__(self, parameters):
                self.param_groups = [{"params": list(parameters)}]

        with pytest.raises(TypeError, match="Half"):
            count(Half(net.parameters()))


class TestOwningOptimizers:
    def test_those_that_own_one_of_the_parameters_by_identity(self):
        nets = [nn.Linear(2, 1) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        both = torch.optim.SGD([nets[0].weight, nets[1].bias], lr=0.1)
        assert owning_optimizers([first, second, both, both], nets[0].parameters()) == [first, both]
        assert owning_optimizers([first, second], []) == []

    def test_where_the_parameters_are_not_known_any_optimizer_may_own_them(self, net):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
        assert owning_optimizers(optimizers, None) == optimizers

    def test_parameters_of_a_later_group_count(self, net):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.add_param_group({"params": [net.bias]})
        assert owning_optimizers([optimizer], net.parameters()) == [optimizer]

    def test_a_lightning_optimizer_is_unwrapped(self, net, count, steps):
        from lightning.pytorch.core.optimizer import LightningOptimizer

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapper = LightningOptimizer(optimizer)
        (owner,) = owning_optimizers([wrapper], net.parameters())
        assert owner is optimizer
        count(wrapper)
        optimizer.step()
        assert len(steps) == 1

    def test_an_optimizer_that_builds_on_another_one_is_counted_itself(self, net, count):
        class Lookahead(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer
                super().__init__(optimizer.param_groups, {})

            def step(self, closure=None):
                self.optimizer.step()
                with torch.no_grad():
                    net.bias.fill_(7.0)

        outer = Lookahead(torch.optim.SGD(net.parameters(), lr=0.1))
        seen = []
        counter = OptimizerStepCounter(owning_optimizers([outer], [net.bias]), lambda: seen.append(net.bias.item()))
        outer.step()
        counter.remove()
        assert seen == [7.0]

    def test_something_that_is_no_optimizer_is_refused(self, net):
        with pytest.raises(TypeError, match="object is no optimizer"):
            owning_optimizers([object()], net.parameters())
