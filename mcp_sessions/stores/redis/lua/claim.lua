-- needs: session
-- ARGV: who claims it (empty: nobody), instead of whom (empty: nobody). Who has it.
if redis.call('EXISTS', base) == 0 then
    return false
end
local holder = redis.call('HGET', base, 'holder')
if ARGV[1] ~= '' and (not holder or holder == ARGV[2]) then
    redis.call('HSET', base, 'holder', ARGV[1])
    return ARGV[1]
end
return holder
