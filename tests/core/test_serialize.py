"""pack and unpack: what stays out of the stream, what arrives read-only, what an error says."""

import pickle
import threading

import numpy as np
import pytest

from miniray.core.engine import Engine
from miniray.core.refs import ObjectRef
from miniray.core.remote import ActorHandle
from miniray.core.serialize import pack, unpack
from miniray.core.specs import ActorInfo
from miniray.errors import NotSerializableError

torch = pytest.importorskip("torch")


def through_read_only_memory(value):
    """As an engine sends it: every buffer as immutable bytes."""
    packed = pack(value)
    return unpack(packed.data, [bytes(b) for b in packed.buffers], packed.refs)


def through_private_memory(value):
    """As an engine sends it: private buffers writable, all others read-only."""
    packed = pack(value)
    copies = [
        bytearray(b) if private else bytes(b)
        for b, private in zip(packed.buffers, packed.private, strict=True)
    ]
    return unpack(packed.data, copies, packed.refs)


class StandInRef(ObjectRef):
    def __init__(self, identity):
        self.identity = identity

    @property
    def _id(self):
        return self.identity


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, 3, "text", b"bytes", (1, [2, {"three": {4}}]), range(5)],
    ids=lambda v: type(v).__name__,
)
def test_plain_values_come_back_equal_and_without_buffers(value):
    packed = pack(value)
    assert packed.buffers == []
    assert unpack(packed.data) == value


def test_functions_and_classes_defined_on_the_spot_travel():
    offset = 10

    class Local:
        def value(self):
            return offset

    make = through_read_only_memory(lambda n: Local().value() + n)
    assert make(5) == 15


# -- arrays --------------------------------------------------------------------------------------


def test_an_array_stays_out_of_the_stream_and_is_not_copied():
    array = np.arange(100_000, dtype=np.int64)
    packed = pack({"weights": array})
    assert [b.nbytes for b in packed.buffers] == [800_000]
    assert len(packed.data) < 1000
    assert packed.nbytes == len(packed.data) + 800_000
    array[0] = 42  # the buffer is a view on the caller's memory
    assert np.frombuffer(packed.buffers[0], dtype=np.int64)[0] == 42


@pytest.mark.parametrize("size", [3, 100_000])
def test_arrays_of_any_size_arrive_read_only(size):
    array = np.arange(size, dtype=np.float32).reshape(1, -1)
    back = through_private_memory(array)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == np.float32
    assert not back.flags.writeable


def test_the_array_is_built_over_the_memory_given():
    packed = pack(np.zeros(4, dtype=np.uint8))
    memory = bytearray(4)
    back = unpack(packed.data, [memoryview(memory).toreadonly()])
    memory[2] = 7
    assert back.tolist() == [0, 0, 7, 0]


def test_fortran_order_survives():
    array = np.asfortranarray(np.arange(12).reshape(3, 4))
    back = through_read_only_memory(array)
    np.testing.assert_array_equal(back, array)
    assert back.flags.f_contiguous


# -- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
    ],
    ids=["matrix", "scalar", "empty", "transposed", "bfloat16", "bool", "conjugate"],
)
@pytest.mark.parametrize("send", [through_read_only_memory, through_private_memory])
def test_tensors_come_back_equal(tensor, send):
    back = send(tensor)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("send", [through_read_only_memory, through_private_memory])
def test_a_received_tensor_can_be_written_without_changing_the_senders(send):
    tensor = torch.zeros(1000)
    back = send(tensor)
    back += 1
    assert back.sum().item() == 1000
    assert tensor.sum().item() == 0


def test_a_tensors_buffer_is_private_and_an_arrays_is_not():
    packed = pack([np.zeros(10, dtype=np.uint8), torch.zeros(20, dtype=torch.uint8)])
    assert [(b.nbytes, p) for b, p in zip(packed.buffers, packed.private, strict=True)] == [
        (10, False),
        (20, True),
    ]


def test_private_memory_is_used_as_it_is():
    packed = pack(torch.zeros(4, dtype=torch.uint8))
    memory = bytearray(4)
    back = unpack(packed.data, [memory])
    back[1] = 9
    assert memory == bytearray([0, 9, 0, 0])


def test_a_view_sends_only_its_own_part():
    large = torch.zeros(1_000_000)
    assert sum(b.nbytes for b in pack(large[:10]).buffers) == 40


def test_parameters_stay_parameters():
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    back = through_private_memory(module)
    assert isinstance(back.weight, torch.nn.Parameter)
    assert (back.weight.requires_grad, back.bias.requires_grad) == (True, False)
    torch.testing.assert_close(back.weight, module.weight, rtol=0, atol=0)


def test_requires_grad_travels_but_the_graph_does_not():
    leaf = torch.ones(2, requires_grad=True)
    back = through_private_memory(leaf * 2)
    assert back.requires_grad
    assert back.is_leaf
    assert back.tolist() == [2, 2]


def test_sparse_tensors_travel_in_torchs_own_way():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through_read_only_memory(sparse).to_dense(), torch.eye(3))


# -- refs ----------------------------------------------------------------------------------------


def test_refs_travel_by_index_beside_the_stream():
    first, second = StandInRef(b"1"), StandInRef(b"2")
    packed = pack({"a": [first], "b": (second, first)})
    assert packed.refs == [first, second]
    there = [StandInRef(b"x"), StandInRef(b"y")]
    back = unpack(packed.data, refs=there)
    assert back["a"][0] is there[0]
    assert back["b"] == (there[1], there[0])


def test_handles_travel_by_index_too():
    handle = ActorHandle(None, None, "id", ActorInfo("Thing", {}))
    packed = pack([handle])
    assert packed.refs == [handle]
    assert b"Thing" not in packed.data


def test_unpacking_inside_unpacking_keeps_the_refs_apart():
    inner = pack([StandInRef(b"inner")])
    reached = []

    class Outer:
        def __init__(self, ref):
            self.ref = ref

        def __reduce__(self):
            return rebuild, (inner.data, self.ref)

    def rebuild(data, ref):
        reached.append(unpack(data, refs=["inner there"]))
        return ref

    packed = pack([Outer(StandInRef(b"a")), StandInRef(b"b")])
    back = unpack(packed.data, refs=["a there", "b there"])
    assert back == ["a there", "b there"]


def test_the_refs_of_two_threads_do_not_mix():
    packed = pack([StandInRef(b"1")] * 1)
    barrier = threading.Barrier(2)
    seen = {}

    def load(name):
        barrier.wait()
        seen[name] = [unpack(packed.data, refs=[name])[0] for _ in range(500)]

    threads = [threading.Thread(target=load, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": ["a"] * 500, "b": ["b"] * 500}


# -- what cannot travel --------------------------------------------------------------------------


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def a_lock():
    return threading.Lock()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (a_lock(), "value"),
        ([1, a_lock()], "value[1]"),
        ({"a": {"b": a_lock()}}, "value['a']['b']"),
        (Holder(fine=1, model=Holder(cache=[a_lock()])), "value.model.cache[0]"),
    ],
    ids=["itself", "list", "dict", "attributes"],
)
def test_the_error_leads_to_the_offending_part(value, path):
    with pytest.raises(NotSerializableError) as caught:
        pack(value)
    assert caught.value.path == path
    assert path in str(caught.value)
    assert "lock" in str(caught.value)


def test_the_error_names_a_captured_variable():
    lock = a_lock()

    def uses_it():
        return lock

    with pytest.raises(NotSerializableError, match="'lock'"):
        pack(uses_it, "function uses_it")


def test_of_a_generator_a_list_is_asked_for(golden):
    with pytest.raises(NotSerializableError) as caught:
        pack({"weights": (i for i in range(3))})
    golden("generator.txt", f"{caught.value}\n")


def test_the_error_names_what_was_being_sent_and_its_type():
    with pytest.raises(NotSerializableError) as caught:
        pack(Holder(lock=a_lock()), "argument 0 of f")
    assert caught.value.path == "argument 0 of f.lock"
    assert "Holder" in str(caught.value)


def test_whatever_pickling_raises_becomes_our_error():
    class Explosive:
        def __reduce__(self):
            raise ZeroDivisionError("boom")

    with pytest.raises(NotSerializableError, match="boom") as caught:
        pack(Explosive())
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_object_that_contains_itself_does_not_hang_the_search():
    loop = Holder(lock=a_lock())
    loop.itself = loop
    with pytest.raises(NotSerializableError):
        pack(loop)


def test_the_error_itself_can_travel():
    with pytest.raises(NotSerializableError) as caught:
        pack([a_lock()])
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.path) == (str(caught.value), "value[0]")


def test_engine_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Engine()
