import train as benchmark


def test_on_a_cpu_steps_are_plain_and_called_so():
    assert benchmark.kinds(is_cuda=False, compiles=True) == {"eager": {"captures": False, "compiles": False}}
    assert list(benchmark.kinds(is_cuda=True, compiles=False)) == ["eager", "graph"]
    found = benchmark.kinds(is_cuda=True, compiles=True)
    assert found["graph"] == {"captures": True, "compiles": False}
    assert found["graph and compile"] == {"captures": True, "compiles": True}
