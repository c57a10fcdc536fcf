-- needs: session
-- ARGV: now, then each mode and its idle deadline from now on
local ends, mode = unpack(redis.call('HMGET', base, 'ends', 'mode'))
local deadline = deadline_for(mode, 2)
if deadline and not has_come(ends, ARGV[1]) then
    move_deadline(tonumber(ARGV[1]), deadline, ends)
end
return false
