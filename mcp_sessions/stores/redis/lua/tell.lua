-- needs: session story
-- ARGV: entries of its story, each as its time and its text. Nothing if the session is not there.
if redis.call('EXISTS', base) == 0 then
    return false
end
for i = 1, #ARGV, 2 do
    tell(ARGV[i], ARGV[i + 1])
end
return 1
