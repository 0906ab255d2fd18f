def test_a(programs): 
    print({k:p.buffers.nbytes for k,p in programs.items()})
def test_b(chain):
    print(chain("stop").report.cached, chain("mid").report.cached, chain("accept",32).report.cached, chain("accept",32).report.seconds)
